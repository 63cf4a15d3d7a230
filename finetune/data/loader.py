"""Which rows make which step, and rows to a batch. Everything here is a pure function; nothing remembers a position.

The order of an epoch depends on (seed, epoch) alone, and a position is a number of rows consumed. So a run resumed
anywhere, with any number of ranks or another batch size, goes on with the first row that was not yet seen.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from finetune.contracts import IGNORED, Batch, Row
from finetune.data.mixture import Mixture


@dataclass(frozen=True)
class Position:
    """Where a run stands: `row` rows of this epoch's permutation have been consumed."""

    epoch: int
    row: int


def draws(seed: int, *place: int) -> np.random.Generator:
    """Random draws that belong to a place (an epoch; an epoch, a rank and a row; ...): the same whoever asks, and when.

    So processes and threads share no state that could repeat, and none needs to be told apart from another.
    """
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, *place])))


class Order:
    """The rows of each step: `batch` rows, or as many as fit into `batch_tokens` (at least one)."""

    def __init__(
        self,
        lengths: Sequence[int] | np.ndarray,
        batch: int | None,
        batch_tokens: int | None,
        seed: int,
        shuffle: bool = True,
        mixture: Mixture | None = None,
    ) -> None:
        if (batch is None) == (batch_tokens is None):
            raise ValueError("give either batch or batch_tokens")
        self.lengths = np.asarray(lengths, dtype=np.int64)
        self.batch = batch
        self.batch_tokens = batch_tokens
        self.seed = seed
        self.shuffle = shuffle
        self.mixture = mixture

    @property
    def epoch_rows(self) -> int:
        """Rows that an epoch takes."""
        return self.mixture.epoch_rows if self.mixture else len(self.lengths)

    def permutation(self, epoch: int) -> np.ndarray:
        """Row indices in the order of that epoch, int64 [rows]; counter-based, so no epoch needs the one before."""
        rows = np.arange(len(self.lengths))
        if self.mixture:
            rows = self.mixture.draw(self.seed, epoch, self.shuffle)
        return draws(self.seed, epoch).permutation(rows) if self.shuffle else rows

    def steps(self, epoch: int, start: int = 0) -> Iterator[tuple[np.ndarray, int]]:
        """The steps of an epoch from a position on, each with the position after it."""
        for rows in self.batches(epoch, start):
            start += len(rows)
            yield rows, start

    def place(self, row: int) -> str:
        """A position within an epoch, in words."""
        return f"row {row}"

    def batches(self, epoch: int, start: int = 0) -> list[np.ndarray]:
        """The steps of an epoch from row offset `start` of its permutation on; the last one may be incomplete."""
        rows = self.permutation(epoch)[start:]
        if self.batch is not None:
            return [rows[at : at + self.batch] for at in range(0, len(rows), self.batch)]
        assert self.batch_tokens is not None
        cuts, tokens = [0], 0
        for at, length in enumerate(self.lengths[rows].tolist()):
            if at > cuts[-1] and tokens + length > self.batch_tokens:
                cuts.append(at)
                tokens = 0
            tokens += length
        return [rows[first:last] for first, last in zip(cuts, [*cuts[1:], len(rows)], strict=True) if last > first]


def total_steps(
    order: Order, epochs: float | None, max_steps: int | None, position: Position | None = None, done: int = 0
) -> int:
    """Optimizer steps of a run: `max_steps`, or those of `epochs`, the fewer if both are given; neither: one epoch.

    A part of an epoch is that part of its steps, rounded up. A run that goes on from `position` after `done` steps
    counts those and what remains, so another batch size on resume ends at the same row.
    """
    if epochs is None and max_steps is not None:
        return max_steps
    wanted = 1.0 if epochs is None else epochs
    at = position or Position(0, 0)
    steps = done
    for epoch in range(at.epoch, max(1, math.ceil(wanted - 1e-9))):
        if max_steps is not None and steps >= max_steps:
            break
        whole = _steps_of(order, epoch, 0)
        left = _steps_of(order, epoch, at.row) if epoch == at.epoch else whole
        share = max(1, math.ceil(min(1.0, wanted - epoch) * whole - 1e-9))
        steps += max(0, share - (whole - left))
    return steps if max_steps is None else min(steps, max_steps)


def _steps_of(order: Order, epoch: int, start: int) -> int:
    """With a fixed number of rows every epoch has as many steps; with tokens it depends on the permutation."""
    if order.batch is not None:
        return math.ceil((order.epoch_rows - start) / order.batch)
    return len(order.batches(epoch, start))


def micro_batches(rows: Sequence[int] | np.ndarray, rank: int, ranks: int, micro_batch: int) -> list[np.ndarray]:
    """This rank's share of a step, rows[rank::ranks], cut into micro-batches; empty when rows are fewer than ranks."""
    own = np.asarray(rows, dtype=np.int64)[rank::ranks]
    return [own[at : at + micro_batch] for at in range(0, len(own), micro_batch)]


def collate(rows: Sequence[Row], pad_id: int) -> Batch:
    """Rows to one batch, padded on the right with `pad_id`. Padding is never trained, whatever its id.

    When a row holds several documents, document ids count from 0 in each row, padding is one more document, and
    positions restart at each; otherwise both are None, since causal order alone keeps padding from what stands before.
    """
    import torch

    lengths = tuple(len(row.input_ids) for row in rows)
    shape = (len(rows), max(lengths))
    ids = np.full(shape, pad_id, dtype=np.int64)
    labels = np.full(shape, IGNORED, dtype=np.int64)
    for at, row in enumerate(rows):
        ids[at, : lengths[at]] = row.input_ids
        labels[at, : lengths[at]] = row.labels
    packed = any(len(row.document_lengths) > 1 for row in rows)
    documents, positions = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.int64)
    if packed:
        for at, row in enumerate(rows):
            parts = [*row.document_lengths, shape[1] - lengths[at]]
            documents[at] = np.repeat(np.arange(len(parts)), parts)
            positions[at] = np.concatenate([np.arange(part) for part in parts])
    return Batch(
        input_ids=torch.from_numpy(ids),
        labels=torch.from_numpy(labels),
        row_ids=torch.tensor([row.id for row in rows], dtype=torch.int64),
        document_ids=torch.from_numpy(documents) if packed else None,
        positions=torch.from_numpy(positions) if packed else None,
        lengths=lengths,
    )
