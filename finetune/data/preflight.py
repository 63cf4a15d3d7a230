"""What became of a data file: counts, reasons, warnings and a sample, and whether it can be trained on at all.

A report is made while rows are prepared, so it costs nothing, and nothing is left out of it: every row that came in is
kept, or dropped with a reason that is counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from finetune.contracts import IGNORED, Row
from finetune.errors import DataError

if TYPE_CHECKING:
    from rich.console import RenderableType

TOO_LONG = "longer than data.max_tokens"
CUT = "truncated"
LOST = "no trainable token left after truncation"
SHOWN_CHARACTERS = 2000
BAR = 30

Pieces = tuple[tuple[str, bool], ...]
"""A document as runs of text, each with whether it is trained."""


@dataclass(frozen=True)
class DataReport:
    """One split. `rows_in` are rows of the file, `documents` what became of them, `rows` training rows (packed or not).

    `dropped` and `notes` count rows by reason; `places` names up to five of the rows of each. `sample` is the first
    document as (text, trained) pieces. `lengths` has percentiles of document lengths in tokens, `histogram` pairs of
    (largest length of the bin, documents). `prompt_tokens` is the median prompt of the rows that truncation emptied.
    """

    split: str
    path: str
    template: str
    kind: str
    train_on: str
    max_tokens: int
    limit_source: str
    rows_in: int
    rows_kept: int
    dropped: Mapping[str, int]
    truncated: int
    documents: int
    tokens: int
    trained_tokens: int
    packed: bool
    rows: int
    efficiency: float
    lengths: Mapping[str, int]
    histogram: tuple[tuple[int, int], ...]
    duplicates: int
    stop: str
    stopped_documents: int
    prompt_tokens: int
    notes: Mapping[str, int]
    places: Mapping[str, tuple[str, ...]]
    warnings: tuple[str, ...]
    sample: tuple[tuple[str, bool], ...]

    @property
    def supervised_ratio(self) -> float:
        """Trained tokens a token."""
        return self.trained_tokens / self.tokens if self.tokens else 0.0


def check(report: DataReport) -> None:
    """Raises DataError when no row is left, no token is trained, or the stop token is never trained."""
    if report.documents == 0:
        raise _empty_error(report)
    if report.trained_tokens == 0:
        raise DataError(
            "0 tokens would be trained", where=report.path, remedy=f"look at data.template={report.template}"
        )
    if report.kind != "text" and report.stopped_documents == 0:
        raise _stop_error(report)


def _empty_error(report: DataReport) -> DataError:
    """Truncation and a mask that covers nothing look the same from outside; each gets its own message."""
    total, limit = report.rows_in, report.max_tokens
    where = report.path
    if report.dropped.get(LOST) == total and report.kind == "text":
        what = f"{total} of {total} rows have no trainable token left: the first token of a piece is never trained"
        return DataError(what, where=where, remedy=f"raise data.max_tokens={limit}")
    if report.dropped.get(LOST) == total:
        what = (
            f"{total} of {total} rows have no trainable token left: their prompts alone fill data.max_tokens={limit} "
            f"(the median prompt has {report.prompt_tokens} tokens)"
        )
        return DataError(
            what, where=where, remedy=f"raise data.max_tokens above {report.prompt_tokens}, or shorten prompts"
        )
    reasons = ", ".join(f"{count} {reason}" for reason, count in report.dropped.items())
    if not set(report.dropped) - {TOO_LONG, LOST}:
        what = f"0 of {total} rows left after filtering ({reasons}; limit {limit})"
        return DataError(what, where=where, remedy="raise data.max_tokens, or set data.on_long=truncate")
    first = next((f"; the first is {places[0]}" for places in report.places.values() if places), "")
    what = f"0 of {total} rows left, so 0 tokens would be trained ({reasons}{first})"
    remedy = (
        f"mend them; or look at their roles, and at data.template={report.template}, data.train_on={report.train_on}"
    )
    return DataError(what, where=where, remedy=remedy)


def _stop_error(report: DataReport) -> DataError:
    if report.stop and report.truncated:
        cut = f"{report.truncated} of {report.documents} documents are cut off"
        what = f"the stop token {report.stop!r} is never trained: {cut}"
        remedy = f"raise data.max_tokens={report.max_tokens}, or set data.on_long=drop"
        return DataError(what, where=report.path, remedy=remedy)
    what = f"no stop token is ever trained with data.template={report.template}: the model would not learn to stop"
    return DataError(
        what, where=report.path, remedy="use a tokenizer with an end-of-text token, or a chat template with one"
    )


def as_dict(report: DataReport) -> dict[str, Any]:
    """The report as plain values, for --json."""
    values = asdict(report) | {"supervised_ratio": report.supervised_ratio}
    return values | {"sample": [{"text": text, "trained": trained} for text, trained in report.sample]}


def facts(report: DataReport) -> list[tuple[str, str]]:
    """The report's counts as lines of a table."""
    limit = f"{report.max_tokens:,} tokens ({report.limit_source})"
    lines = [
        ("file", report.path),
        ("template", f"{report.template}, learning {'all' if report.kind == 'text' else report.train_on}"),
        ("length limit", limit),
        ("rows in / kept / dropped", f"{report.rows_in:,} / {report.rows_kept:,} / {sum(report.dropped.values()):,}"),
        *(
            (f"  dropped: {reason}", _counted(count, report.places.get(reason)))
            for reason, count in report.dropped.items()
        ),
        ("truncated", _counted(report.truncated, report.places.get(CUT))),
        ("documents", f"{report.documents:,} ({report.duplicates:,} repeat an earlier one)"),
        ("tokens / trained", f"{report.tokens:,} / {report.trained_tokens:,} ({report.supervised_ratio:.1%})"),
        ("stop token trained", f"{report.stop!r} in {report.stopped_documents:,} of {report.documents:,} documents"),
        (
            "rows to train on",
            f"{report.rows:,}" + (f", {report.efficiency:.1%} full (packed)" if report.packed else ""),
        ),
        ("lengths", ", ".join(f"{name} {value:,}" for name, value in report.lengths.items()) or "none"),
    ]
    lines += [(f"  {note}", _counted(count, report.places.get(note))) for note, count in report.notes.items()]
    return lines


def _counted(count: int, places: tuple[str, ...] | None) -> str:
    if not places:
        return f"{count:,}"
    more = ", ..." if count > len(places) else ""
    return f"{count:,} ({', '.join(places)}{more})"


def pieces(row: Row, tokenizer: Any) -> Pieces:
    """A row as the model gets it: (text, trained) runs of its tokens."""
    learned = row.labels != IGNORED
    cuts = [0, *(at + 1 for at in range(len(learned) - 1) if learned[at] != learned[at + 1]), len(learned)]
    return tuple(
        (
            str(
                tokenizer.decode(
                    row.input_ids[first:last].tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False
                )
            ),
            bool(learned[first]),
        )
        for first, last in pairwise(cuts)
    )


def plain(documents: Sequence[Pieces]) -> list[list[dict[str, Any]]]:
    """Documents of `pieces` as plain values, for --json."""
    return [[{"text": text, "trained": trained} for text, trained in document] for document in documents]


def render(report: DataReport, documents: Sequence[Pieces] | None = None) -> RenderableType:
    """The report for a terminal: counts, histogram of lengths, warnings, and documents whose trained text is marked.

    `documents` are those to show (of `pieces`); None: the report's own sample.
    """
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table(title=f"data: {report.split}", title_justify="left", show_header=False, box=None, pad_edge=False)
    for name, value in facts(report):
        table.add_row(Text(name, style="dim"), Text(value))
    bars = Table(show_header=False, box=None, pad_edge=False)
    most = max((count for _, count in report.histogram), default=1)
    for upper, count in report.histogram:
        bars.add_row(Text(f"<= {upper:,}", justify="right"), Text("█" * round(BAR * count / most)), Text(f"{count:,}"))
    parts: list[RenderableType] = [table]
    if report.histogram:
        parts.append(bars)
    parts += [Text(f"warning: {warning}", style="yellow") for warning in report.warnings]
    if documents is None:
        return Group(*parts, sample(report))
    return Group(*parts, *(_panel(document, number) for number, document in enumerate(documents, start=1)))


def sample(report: DataReport) -> RenderableType:
    """The first document as the model gets it, what is trained in bold."""
    return _panel(report.sample, 1)


def _panel(document: Pieces, number: int) -> RenderableType:
    from rich.panel import Panel
    from rich.text import Text

    shown, room = Text(), SHOWN_CHARACTERS
    for text, trained in document:
        shown.append(text[:room], style="bold green" if trained else "dim")
        room -= min(room, len(text))
    if not room:
        shown.append(" ...")
    which = "first document" if number == 1 else f"document {number}"
    return Panel(shown, title=f"{which} (trained text is bold)", title_align="left")


def headline(report: DataReport) -> str:
    """The report in a line, with everything that was dropped, cut or changed."""
    packed = f" packed into {report.rows:,} rows, {report.efficiency:.1%} full" if report.packed else ""
    truncated = _counted(report.truncated, report.places.get(CUT))
    parts = [
        f"{report.documents:,} documents{packed}",
        f"{report.tokens:,} tokens, {report.trained_tokens:,} of them trained ({report.supervised_ratio:.1%})",
        *(
            f"dropped {_counted(count, report.places.get(reason))}: {reason}"
            for reason, count in report.dropped.items()
        ),
        *([f"{truncated} truncated at {report.max_tokens:,} tokens"] if report.truncated else []),
        *(f"{_counted(count, report.places.get(note))} {note}" for note, count in report.notes.items()),
    ]
    return f"data  {report.split}: {'; '.join(parts)}  ({report.path})"
