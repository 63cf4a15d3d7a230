"""Several files as one set of training rows, and how many of an epoch's rows come from each.

Without weights an epoch is every row of every file once. With weights, they are the proportions of an epoch's rows
(packed rows: of rows, so nearly of tokens, since no row mixes files). The epoch is as long as the file that runs out
first allows ("stop": no row comes twice; other files give different rows in the next epoch), or as the file that runs
out last needs ("repeat": every row comes at least once, those of the others again).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import overload

import numpy as np

from finetune.config.schema import DataSection
from finetune.data.preflight import DataReport
from finetune.data.rows import RowSet
from finetune.data.sources import Record, Records, load_records
from finetune.errors import DataError

PASSES = 0x9A55
"""Keeps the draws of a file's passes apart from the draws of the epochs' orders."""
MOST_PASSES, MOST_ROWS = 10_000, 2**29
"""Passes over a file, and rows, that an epoch may have; each row's number is drawn before the epoch begins."""
SMALLEST = 1e-300
DISTORTED = 0.1
"""How far a file's share of an epoch may be from its weight, as a part of it, before that is told."""


class MixedRecords(Records):
    """The records of several files behind one another. `parts` are their names, each with its first record's number."""

    def __init__(self, files: Mapping[str, Records]) -> None:
        self._files = tuple(files.values())
        self._firsts = np.cumsum([0, *map(len, self._files)])
        self.parts = tuple(zip(files, self._firsts[:-1].tolist(), strict=True))
        self.path = f"mixture of {', '.join(files)}"

    def __len__(self) -> int:
        return int(self._firsts[-1])

    def _at(self, index: int) -> tuple[Records, int]:
        if not 0 <= index < len(self):
            raise IndexError(f"record {index} of {len(self)}")
        number = int(np.searchsorted(self._firsts, index, side="right")) - 1
        return self._files[number], index - int(self._firsts[number])

    @overload
    def __getitem__(self, index: int) -> Record: ...
    @overload
    def __getitem__(self, index: slice) -> list[Record]: ...
    def __getitem__(self, index: int | slice) -> Record | list[Record]:
        if isinstance(index, slice):
            return [self[at] for at in range(*index.indices(len(self)))]
        file, own = self._at(index)
        return file[own]

    def where(self, index: int) -> str:
        """The file and the line of a record."""
        file, own = self._at(index)
        return file.where(own)

    def columns(self) -> list[str]:
        """The columns that every file has."""
        every = [file.columns() for file in self._files]
        return [name for name in every[0] if all(name in names for names in every)]

    def headers(self) -> list[tuple[list[str], int]]:
        """Each file's columns, with its first record's number."""
        return [(file.columns(), first) for file, (_, first) in zip(self._files, self.parts, strict=True)]


def load_mixture(data: DataSection) -> MixedRecords:
    """The records of data.mixture's files, in its order; data.max_rows holds for each. Raises as load_records does."""
    return MixedRecords({name: load_records(path, data) for name, path in data.mixture.items()})


@dataclass(frozen=True)
class Mixture:
    """Rows by file: `counts` there are, `taken` in an epoch. The rows of a file stand behind one another."""

    counts: tuple[int, ...]
    taken: tuple[int, ...]

    @property
    def epoch_rows(self) -> int:
        return sum(self.taken)

    def draw(self, seed: int, epoch: int, shuffle: bool = True) -> np.ndarray:
        """The rows of an epoch, file by file. A file goes through its rows in passes, each in an order of its own.

        So its rows come equally often over the epochs, whatever share of them an epoch takes. A pure function.
        """
        found, first = [], 0
        for number, (count, taken) in enumerate(zip(self.counts, self.taken, strict=True)):
            start, parts = epoch * taken, []
            for turn in range(start // count, -(-(start + taken) // count)):
                order = np.arange(count)
                if shuffle:
                    keys = np.random.SeedSequence([seed, PASSES, number, turn])
                    order = np.random.Generator(np.random.Philox(keys)).permutation(count)
                parts.append(order[max(0, start - turn * count) : start + taken - turn * count])
            found.append(np.concatenate(parts) + first)
            first += count
        return np.concatenate(found)


def mixture_of(rows: RowSet, data: DataSection) -> Mixture | None:
    """How an epoch is drawn from rows of a weighted mixture; None where every row comes once. DataError for an empty file."""
    if not data.weights:
        return None
    counts = rows.part_rows
    empty = [name for name, count in counts.items() if not count]
    if empty:
        what = f"the mixture's {', '.join(empty)} has no row left, and data.weights gives it a share"
        raise DataError(what, where="data.mixture", remedy="look at its rows with `finetune data`, or leave it out")
    shares = taken([*counts.values()], [data.weights[name] for name in counts], data.on_exhausted)
    return Mixture(tuple(counts.values()), shares)


def taken(counts: Sequence[int], weights: Sequence[float], on_exhausted: str) -> tuple[int, ...]:
    """Rows that an epoch takes of each file, at least one: in the weights' proportion, as many as `on_exhausted` allows.

    DataError where that repeats a file more than MOST_PASSES times, or is more than MOST_ROWS rows.
    """
    largest = max(weights)
    weights = [max(weight / largest, SMALLEST) for weight in weights]
    lengths = [count / weight for count, weight in zip(counts, weights, strict=True)]
    if on_exhausted == "repeat":
        longest = max(lengths)
        passes = max(longest * weight / count for count, weight in zip(counts, weights, strict=True))
        if passes > MOST_PASSES or longest * sum(weights) > MOST_ROWS:
            what = (
                f"an epoch would be {longest * sum(weights):,.0f} rows, and the file repeated most would come "
                f"{passes:,.0f} times (at most {MOST_ROWS:,} rows and {MOST_PASSES:,} times)"
            )
            remedy = "raise the smallest of data.weights, or set data.on_exhausted=stop"
            raise DataError(what, where="data.weights", remedy=remedy)
        return tuple(max(count, round(longest * weight)) for count, weight in zip(counts, weights, strict=True))
    shortest = min(lengths)
    return tuple(min(count, max(1, round(shortest * weight))) for count, weight in zip(counts, weights, strict=True))


def counted(rows: RowSet, data: DataSection) -> DataReport:
    """The rows' report with the rows of each file of a mixture, and how many of them make an epoch."""
    if not rows.parts:
        return rows.report
    drawn = mixture_of(rows, data) if all(rows.part_rows.values()) else None
    shares = drawn.taken if drawn else rows.part_rows.values()
    notes = {
        f"rows of {name} ({data.mixture[name]}), {share:,} an epoch": count
        for (name, count), share in zip(rows.part_rows.items(), shares, strict=True)
    }
    warnings = (*rows.report.warnings, *_distorted(drawn, [*rows.part_rows], data))
    return replace(rows.report, notes={**rows.report.notes, **notes}, warnings=warnings)


def _distorted(drawn: Mixture | None, names: Sequence[str], data: DataSection) -> list[str]:
    """A warning where whole rows cannot come near the weights, with the shares that result."""
    if drawn is None:
        return []
    wanted = [data.weights[name] / sum(data.weights[other] for other in names) for name in names]
    got = [taken / drawn.epoch_rows for taken in drawn.taken]
    if all(abs(share - wish) <= DISTORTED * wish for share, wish in zip(got, wanted, strict=True)):
        return []
    shares = ", ".join(
        f"{name} {share:.3g} % instead of {wish:.3g} %"
        for name, share, wish in zip(names, (100 * g for g in got), (100 * w for w in wanted), strict=True)
    )
    return [f"an epoch of {drawn.epoch_rows:,} rows cannot keep to data.weights; it takes {shares}"]
