"""Training rows made while training, for files larger than memory.

The file is read in blocks of data.shuffle_buffer records, in its order. A block is rendered, tokenised and packed by
itself and its rows shuffled by (seed, epoch, block) alone. So a row's number, block * STRIDE + its place in the block,
says where to go on: a resumed run passes over the lines before its block without parsing them, makes the one block
again and has the same rows to the bit. Each rank reads the whole stream and takes its share of every step.
"""

from __future__ import annotations

import hashlib
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import count, islice
from pathlib import Path
from typing import Any, overload

import numpy as np

from finetune.config.schema import Recipe
from finetune.contracts import Row
from finetune.data.ahead import Ahead
from finetune.data.cells import RowError
from finetune.data.loader import Order, draws
from finetune.data.preflight import CUT, DataReport
from finetune.data.preparation import Preparation, Tell
from finetune.data.record_streams import Placed, stream_records
from finetune.data.rendering import Renderer
from finetune.data.rows import RowSet
from finetune.data.sources import Record, Records
from finetune.errors import DataError, FinetuneError

STRIDE = 2**24
"""Numbers of rows that a block has; it holds far fewer."""
HELD_STEPS = 8
"""Steps whose rows can still be looked up: those made ahead, and those that a message may name."""
SAMPLE = 1000
"""Rows that are prepared before the start, to show and to check."""
HEAD_BYTES = 2**20


class Block(Records):
    """The records of one block. Asking for one that cannot be read raises its error."""

    def __init__(self, placed: Sequence[Placed], path: str, partial: bool) -> None:
        self._placed = placed
        self.partial = partial  # what no row of it has, others may
        self.path = path

    def __len__(self) -> int:
        return len(self._placed)

    @overload
    def __getitem__(self, index: int) -> Record: ...
    @overload
    def __getitem__(self, index: slice) -> list[Record]: ...
    def __getitem__(self, index: int | slice) -> Record | list[Record]:
        if isinstance(index, slice):
            return [self[at] for at in range(*index.indices(len(self)))]
        record = self._placed[index][0]
        if isinstance(record, RowError):
            raise record
        return record

    def where(self, index: int) -> str:
        return self._placed[index][1]

    def columns(self) -> list[str]:
        return list(dict.fromkeys(name for row, _ in self._placed if isinstance(row, dict) for name in row))


class Losses:
    """What was dropped, cut or changed in a stream's rows. A block is told and counted once, however often it comes."""

    def __init__(self) -> None:
        self._blocks: set[int] = set()
        self._counts: Counter[str] = Counter()
        self._rows = 0
        self._told = True

    def add(self, report: DataReport, first: int, tell: Tell) -> None:
        """Counts the block whose first record has this number, and tells what was lost in it."""
        if first in self._blocks:
            return
        self._blocks.add(first)
        self._rows += report.rows_in
        found = {f"dropped {{}} {reason}": (count, report.places[reason]) for reason, count in report.dropped.items()}
        if report.truncated:
            found["truncated {}"] = (report.truncated, report.places.get(CUT, ()))
        found |= {f"{{}} {note}": (count, report.places.get(note, ())) for note, count in report.notes.items()}
        if not found:
            return
        self._counts.update({kind: count for kind, (count, _) in found.items()})
        self._told = False
        shown = (f"{kind.format(f'{count:,}')} ({', '.join(places)})" for kind, (count, places) in found.items())
        tell(f"data  rows {first + 1:,} to {first + report.rows_in:,}: {'; '.join(shown)}")

    def tell_total(self, tell: Tell) -> None:
        """One line for all blocks together; nothing where nothing was lost since the last one."""
        if self._told:
            return
        self._told = True
        shown = "; ".join(kind.format(f"{count:,}") for kind, count in self._counts.items())
        tell(f"data  the {self._rows:,} rows of the stream that were read: {shown}")


class StreamRows(RowSet):
    """The rows of a stream: those of the steps in hand can be asked for by number. As a set it is the first of them.

    `report` is of those first rows, and says so. The fingerprint is of the file's size and first MiB, not of all rows.
    """

    def __init__(self, recipe: Recipe, renderer: Renderer, identity: str, tell: Tell) -> None:
        self.recipe, self.renderer, self.tell = recipe, renderer, tell
        self._losses = Losses()
        placed = list(islice(self._records(0), SAMPLE))
        if not placed:
            raise DataError("the file has no rows", where=recipe.data.path or "", remedy="give a file with rows")
        first = self._prepared(placed, 0, partial=False)
        note = (
            f"streamed: these figures are of the first {first.report.rows_in:,} rows; how many there are, and what is "
            "dropped of them, is not known before they are read"
        )
        report = replace(first.report, warnings=(*first.report.warnings, note))
        super().__init__(first._documents, (first._order, first._cuts) if first.packed else None, report)
        self._identity = identity
        self._steps: deque[dict[int, Row]] = deque(maxlen=HELD_STEPS)

    @property
    def longest_row(self) -> int:
        """The longest that a row may be; what comes is not known."""
        return self.recipe.data.max_tokens

    @property
    def longest_document(self) -> int:
        return self.recipe.data.max_tokens

    @property
    def fingerprint(self) -> str:
        return self._identity

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        if isinstance(index, slice):
            return super().__getitem__(index)
        for step in reversed(self._steps):
            if index in step:
                return step[index]
        raise IndexError(f"row {index} of the stream is not in hand")

    def hold(self, rows: Sequence[Row]) -> None:
        """Keeps a step's rows for as long as they may be asked for."""
        self._steps.append({row.id: row for row in rows})

    def _records(self, skip: int) -> Iterator[Placed]:
        limit = self.recipe.data.max_rows
        return islice(stream_records(self.recipe.data, skip), None if limit is None else max(0, limit - skip))

    def _prepared(self, placed: Sequence[Placed], first: int, partial: bool) -> RowSet:
        block = Block(placed, self.recipe.data.path or "", partial)
        rows = Preparation("train", block, self.renderer, self.recipe.data).run(np.arange(len(block)))
        rows._documents.sources[:] += first
        if partial:
            self._losses.add(rows.report, first, self.tell)
        return rows

    def told(self) -> None:
        """Tells what became of all rows that were read up to now, where something is new in that."""
        self._losses.tell_total(self.tell)

    def blocks(self, epoch: int, start: int) -> Iterator[tuple[int, list[Row]]]:
        """Blocks from number `start` on, each with its rows in their training order and with their numbers."""
        size = self.recipe.data.shuffle_buffer
        records = self._records(start * size)
        for number in count(start):
            placed = list(islice(records, size))
            if not placed:
                return
            rows = self._prepared(placed, number * size, partial=True)
            order = draws(self.recipe.train.seed, epoch, number).permutation(len(rows))
            yield number, [replace(rows[int(at)], id=number * STRIDE + place) for place, at in enumerate(order)]


class StreamOrder(Order):
    """The steps of a stream, whose epochs end where the file does. A position is the number of the next row."""

    def __init__(self, rows: StreamRows, recipe: Recipe) -> None:
        super().__init__(rows.lengths, recipe.train.batch, recipe.train.batch_tokens, recipe.train.seed)
        self.rows = rows

    def place(self, row: int) -> str:
        block, place = divmod(row, STRIDE)
        return f"row {place} of block {block}"

    def steps(self, epoch: int, start: int = 0) -> Iterator[tuple[np.ndarray, int]]:
        """As Order's; a block is made while the one before it is used. DataError for an epoch without a row.

        What is wrong with a row is raised at its step, on every rank alike, since all read the same stream.
        """
        pending: list[Row] = []
        tokens = given = 0
        try:
            for row in self._from(epoch, start):
                size = len(row.input_ids)
                if pending and self.batch_tokens is not None and tokens + size > self.batch_tokens:
                    yield self._step(pending)
                    pending, tokens, given = [], 0, given + 1
                pending.append(row)
                tokens += size
                if len(pending) == self.batch:
                    yield self._step(pending)
                    pending, tokens, given = [], 0, given + 1
        except FinetuneError as error:
            error.everywhere = True
            raise
        if pending:
            yield self._step(pending)
        elif not given and start == 0:
            raise DataError("no row of the stream is left to train on", where=self.rows.recipe.data.path or "")

    def _step(self, rows: list[Row]) -> tuple[np.ndarray, int]:
        self.rows.hold(rows)
        return np.asarray([row.id for row in rows], dtype=np.int64), rows[-1].id + 1

    def _from(self, epoch: int, start: int) -> Iterator[Row]:
        block, place = divmod(start, STRIDE)
        try:
            with Ahead(self.rows.blocks(epoch, block), 1, "blocks ahead") as blocks:
                for number, rows in blocks:
                    yield from rows[place if number == block else 0 :]
        finally:  # at the stream's end, and where the run ends before it
            self.rows.told()


def identity_of(recipe: Recipe, settings: str) -> str:
    """What can be said of a stream's content without reading it: its settings, and a file's size and first MiB."""
    digest = hashlib.sha256(settings.encode())
    file = Path(recipe.data.path or "").expanduser()
    if file.is_file():
        with file.open("rb") as opened:
            digest.update(str(file.stat().st_size).encode() + opened.read(HEAD_BYTES))
    return digest.hexdigest()


def stream(recipe: Recipe, renderer: Renderer, settings: Any, tell: Tell) -> StreamRows:
    """The recipe's training rows as a stream. Its first rows are made here, so that a wrong template or file stops at once."""
    return StreamRows(recipe, renderer, identity_of(recipe, repr(settings)), tell)
