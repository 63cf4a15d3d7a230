"""One split on its way from records to rows: rendered, tokenised, cut to length, packed, and counted as it goes.

What is dropped or cut is counted with its reason; a fault that the recipe does not allow to skip stops everything
before any model is loaded.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import numpy as np

from finetune.config.schema import DataSection
from finetune.contracts import IGNORED
from finetune.data.cells import RowError
from finetune.data.packing import Groups, pack_parts
from finetune.data.preflight import CUT, LOST, TOO_LONG, DataReport
from finetune.data.rendering import NO_TURN, Rendered, Renderer, missing_column
from finetune.data.rows import Documents, RowSet
from finetune.data.sources import Record, Records
from finetune.data.tokens import BATCH
from finetune.data.workers import Item, Made, count, crowded, made
from finetune.errors import DataError

SHOWN_PLACES = 5
CHECKED_TEXTS = 20
BINS = 10
BETWEEN_LINES = 10.0
"""Seconds between two lines on how far the tokenising is."""

Tell = Callable[[str], None]
"""Is given a line for the user to see."""

SHORT_TAIL = "documents whose last piece of one token was left out"
CUT_UP = "documents cut into several"


def silent(line: str) -> None:
    """Tells nobody."""


class Preparation:
    """One split on its way from records to rows; counts as it goes."""

    def __init__(
        self,
        split: str,
        records: Records,
        renderer: Renderer,
        data: DataSection,
        known: frozenset[bytes] | set[bytes] = frozenset(),
    ) -> None:
        self.split, self.records, self.renderer, self.data = split, records, renderer, data
        self.tokenizer = renderer.tokenizer
        self.known = known
        self.digests: set[bytes] = set()
        self.faults: list[RowError] = []
        self.fault_count = 0
        self.too_long: list[str] = []
        self.dropped: Counter[str] = Counter()
        self.notes: Counter[str] = Counter()
        self.places: dict[str, list[str]] = {}
        self.ids: list[np.ndarray] = []
        self.labels: list[np.ndarray] = []
        self.sources: list[int] = []
        self.prompts: list[int] = []
        self.counts: Counter[str] = Counter()
        self.misread = ""

    def run(self, rows: np.ndarray, tell: Tell = silent) -> RowSet:
        """The rows at these positions of the file, prepared."""
        self._columns(rows)
        told, done = time.perf_counter(), 0
        workers = count(self.data.workers, len(rows))
        if crowded(workers):
            tell(crowded(workers))
        for batch in made(self.renderer, self._items(rows), workers):
            self._batch(rows[done : done + BATCH].tolist(), batch)
            done += len(batch)
            if time.perf_counter() - told > BETWEEN_LINES:
                told = time.perf_counter()
                tell(f"data  {self.split}: {done:,} of {len(rows):,} rows tokenised")
        self._raise_faults(len(rows))
        starts = np.concatenate([[0], np.cumsum([len(ids) for ids in self.ids], dtype=np.int64)])
        empty = np.zeros(0, dtype=np.int32)
        documents = Documents(
            ids=np.concatenate([empty, *self.ids]),
            labels=np.concatenate([empty, *self.labels]),
            starts=starts,
            sources=np.asarray(self.sources, dtype=np.int64),
        )
        parts = getattr(self.records, "parts", ())
        part_of = np.searchsorted([first for _, first in parts], documents.sources, side="right")
        groups = pack_parts(documents.lengths, self.data.max_tokens, part_of) if self.data.pack else None
        return RowSet(documents, groups, self._report(len(rows), documents, groups), parts)

    def _columns(self, rows: np.ndarray) -> None:
        """A column that no row has is a fault of the file, whatever data.on_bad_row says."""
        if getattr(self.records, "partial", False):
            return
        template = self.renderer.template
        for columns, first in self.records.headers() if len(rows) else ():
            missing = template.missing(columns)
            if missing and columns:  # no column at all: no row could be read, and each says so
                raise missing_column(missing[0], columns, self.records.where(first), template)

    def _items(self, rows: np.ndarray) -> Iterator[list[Item]]:
        for start in range(0, len(rows), BATCH):
            yield [(self._record(at), self.records.where(at)) for at in rows[start : start + BATCH].tolist()]

    def _record(self, position: int) -> Record | RowError:
        try:
            return self.records[position]
        except RowError as fault:
            return fault

    def _batch(self, positions: Sequence[int], batch: Sequence[Made]) -> None:
        for source, each in zip(positions, batch, strict=True):
            if isinstance(each, RowError):
                self._bad(each, source)
                continue
            item, ids, labels = each
            for note in item.notes:
                self._count(self.notes, note, source)
            self.counts["injected"] += item.injected
            self._document(source, item, ids, labels)

    def _count(self, counter: Counter[str], reason: str, source: int) -> None:
        counter[reason] += 1
        self.places.setdefault(reason, [])
        if len(self.places[reason]) < SHOWN_PLACES:
            self.places[reason].append(self.records.where(source).removeprefix(f"{self.records.path} "))

    def _bad(self, fault: RowError, source: int) -> None:
        if not fault.skippable:
            raise fault
        self._count(self.dropped, fault.reason, source)
        self.fault_count += 1
        if len(self.faults) < SHOWN_PLACES:
            self.faults.append(fault)

    def _document(self, source: int, item: Rendered, ids: np.ndarray, labels: np.ndarray) -> None:
        """Cuts to length, drops what teaches nothing, and keeps the rest."""
        limit, learned = self.data.max_tokens, labels != IGNORED
        if not learned.any():
            self._count(self.dropped, NO_TURN, source)
            return
        if self.counts["read back"] < CHECKED_TEXTS:
            self._read_back(item, labels[learned], source)
        if len(ids) > limit:
            if self.data.on_long == "split":
                self._pieces(source, ids, labels)
                return
            if self.data.on_long == "error":
                self.too_long.append(f"{self.records.where(source)} ({len(ids):,} tokens)")
            if self.data.on_long in ("drop", "error"):
                self._count(self.dropped, TOO_LONG, source)
                return
            if not learned[:limit].any():
                self.prompts.append(int(learned.argmax()))
                self._count(self.dropped, LOST, source)
                return
            self._count(self.counts, CUT, source)
            ids, labels = ids[:limit], labels[:limit]
        self.counts["kept"] += 1
        self._keep(source, ids, labels)

    def _pieces(self, source: int, ids: np.ndarray, labels: np.ndarray) -> None:
        """A long document as several; a piece's first token is not trained, so a piece of one teaches nothing."""
        limit, before, left_out = self.data.max_tokens, len(self.ids), False
        for start in range(0, len(ids), limit):
            piece = labels[start : start + limit].copy()
            piece[:1] = IGNORED
            if not (piece != IGNORED).any():
                left_out = True
                continue
            self._keep(source, ids[start : start + limit], piece)
        if len(self.ids) > before:
            self._count(self.notes, CUT_UP, source)
            if left_out:
                self._count(self.notes, SHORT_TAIL, source)
            self.counts["kept"] += 1
        else:
            self.prompts.append(1)
            self._count(self.dropped, LOST, source)

    def _keep(self, source: int, ids: np.ndarray, labels: np.ndarray) -> None:
        digest = hashlib.blake2b(ids.data, digest_size=16).digest()
        self.counts["duplicates"] += digest in self.digests
        self.counts["seen in training"] += digest in self.known
        self.digests.add(digest)
        self.ids.append(ids)
        self.labels.append(labels)
        self.sources.append(source)

    def _read_back(self, item: Rendered, learned: np.ndarray, source: int) -> None:
        """The trained tokens must read as the trained text; only white space may differ (a token may straddle it)."""
        self.counts["read back"] += 1
        expected = "".join(item.text[start:end] for start, end in item.spans)
        found = self.tokenizer.decode(learned.tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        first_is_trained = any(start == 0 for start, _ in item.spans)
        if not first_is_trained and "".join(found.split()) != "".join(expected.split()) and not self.misread:
            where = self.records.where(source)
            self.misread = f"trained tokens of {where} read {found[:60]!r}, but the text to learn is {expected[:60]!r}"

    def _raise_faults(self, total: int) -> None:
        if self.fault_count and self.data.on_bad_row == "error":
            if self.fault_count == 1:
                raise self.faults[0]
            shown = "; ".join(f"{fault.fault.where}: {fault.fault.what}" for fault in self.faults)
            more = f" (the first {SHOWN_PLACES})" if self.fault_count > SHOWN_PLACES else ""
            what = f"{self.fault_count} of {total} rows cannot be used{more}: {shown}"
            remedy = self.faults[0].fault.remedy or "mend them, or set data.on_bad_row=skip to leave them out"
            raise DataError(what, where=self.records.path, remedy=remedy)
        if self.too_long:
            shown = ", ".join(self.too_long[:SHOWN_PLACES])
            what = (
                f"{len(self.too_long)} of {total} rows are longer than data.max_tokens={self.data.max_tokens}: {shown}"
            )
            raise DataError(
                what, where=self.records.path, remedy="raise data.max_tokens, or set data.on_long=truncate or drop"
            )

    def _stopped(self, documents: Documents) -> int:
        """Documents in which the stop token is trained."""
        stop = self.tokenizer(self.renderer.stop, add_special_tokens=False)["input_ids"] if self.renderer.stop else []
        if not stop:
            return 0
        found = np.flatnonzero(documents.labels == stop[-1])
        return len(np.unique(np.searchsorted(documents.starts, found, side="right")))

    def _report(self, total: int, documents: Documents, groups: Groups | None) -> DataReport:
        lengths = documents.lengths
        tokens, limit = int(lengths.sum()), self.data.max_tokens
        rows = len(documents) if groups is None else len(groups[1]) - 1
        stopped = self._stopped(documents)
        return DataReport(
            split=self.split,
            path=self.records.path,
            template=self.renderer.template.name,
            kind=self.renderer.template.kind,
            train_on=self.data.train_on,
            max_tokens=limit,
            limit_source="data.max_tokens",
            rows_in=total,
            rows_kept=self.counts["kept"],
            dropped=dict(self.dropped),
            truncated=self.counts[CUT],
            documents=len(documents),
            tokens=tokens,
            trained_tokens=int(documents.trained.sum()),
            packed=groups is not None,
            rows=rows,
            efficiency=tokens / (rows * limit) if rows else 0.0,
            lengths=_percentiles(lengths),
            histogram=_histogram(lengths),
            duplicates=self.counts["duplicates"],
            stop=self.renderer.stop,
            stopped_documents=stopped,
            prompt_tokens=int(np.median(self.prompts)) if self.prompts else 0,
            notes=dict(self.notes),
            places={reason: tuple(places) for reason, places in self.places.items()},
            warnings=tuple(self._warnings(total, stopped)),
            sample=self._sample(),
        )

    def _warnings(self, total: int, stopped: int) -> list[str]:
        warnings = self.renderer.warnings()
        own, limit = getattr(self.tokenizer, "model_max_length", None), self.data.max_tokens
        if own and own < limit:
            warnings.append(
                f"the tokenizer names a limit of {own:,} tokens; the recipe's data.max_tokens={limit:,} is used"
            )
        if self.counts["injected"]:
            text = self.renderer.form.probe.injected if self.renderer.form else ""
            warnings.append(
                f"{self.counts['injected']:,} of {total:,} rows have no system message, and the model's own chat "
                f"template then adds {text!r}; it stands in training as it will when the model is asked"
            )
        if self.dropped[LOST]:
            why = (
                f"their prompts fill data.max_tokens={limit} (the median one has {int(np.median(self.prompts))} tokens)"
            )
            if self.renderer.template.kind == "text":
                why = f"the first token of a piece is never trained, and data.max_tokens={limit} leaves no other"
            warnings.append(
                f"{self.dropped[LOST]:,} of {total:,} rows had no trainable token left: {why}; they are dropped"
            )
        if self.counts["seen in training"]:
            warnings.append(
                f"{self.counts['seen in training']:,} of {len(self.ids):,} documents also stand in the training rows"
            )
        if self.renderer.template.kind == "text" and self.labels and not stopped:
            warnings.append("no document trains a stop token: the model will not learn where to stop")
        return [*warnings, self.misread] if self.misread else warnings

    def _sample(self) -> tuple[tuple[str, bool], ...]:
        """The first document, decoded in runs of trained and untrained tokens."""
        if not self.ids:
            return ()
        ids, learned = self.ids[0], self.labels[0] != IGNORED
        cuts = [0, *(np.flatnonzero(np.diff(learned)) + 1).tolist(), len(ids)]
        return tuple(
            (
                self.tokenizer.decode(
                    ids[first:last].tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False
                ),
                bool(learned[first]),
            )
            for first, last in pairwise(cuts)
        )


def _percentiles(lengths: np.ndarray) -> dict[str, int]:
    if not len(lengths):
        return {}
    names = {"shortest": 0, "5%": 5, "median": 50, "95%": 95, "longest": 100}
    return {name: round(float(np.percentile(lengths, share))) for name, share in names.items()}


def _histogram(lengths: np.ndarray) -> tuple[tuple[int, int], ...]:
    """Documents by length in up to ten bins of equal width from the shortest on, each named by its largest length."""
    if not len(lengths):
        return ()
    shortest = int(lengths.min())
    width = math.ceil((int(lengths.max()) - shortest + 1) / BINS)
    counts = np.bincount((lengths - shortest) // width)
    return tuple((shortest + (number + 1) * width - 1, int(count)) for number, count in enumerate(counts))
