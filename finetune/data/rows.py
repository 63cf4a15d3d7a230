"""Prepared rows of one split, kept as a few flat arrays: a million documents cost their tokens, not a million objects.

Ids and labels of all documents stand behind one another (int32) with the offsets where each begins; a training row is a
group of document numbers. Rows are cut out when asked for.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self, overload

import numpy as np

from finetune.contracts import IGNORED, Row
from finetune.data.packing import Groups
from finetune.data.preflight import DataReport


@dataclass(frozen=True)
class Documents:
    """Documents behind one another. ids, labels: int32 [tokens]; starts: int64 [documents + 1]; sources: [documents].

    `sources` are the documents' positions in the data file (0-based, after loading).
    """

    ids: np.ndarray
    labels: np.ndarray
    starts: np.ndarray
    sources: np.ndarray

    def __len__(self) -> int:
        return len(self.sources)

    @cached_property
    def lengths(self) -> np.ndarray:
        """Tokens of each document."""
        return np.diff(self.starts)

    @cached_property
    def trained(self) -> np.ndarray:
        """Trained tokens of each document."""
        return np.diff(np.concatenate([[0], np.cumsum(self.labels != IGNORED)])[self.starts])


class RowSet(Sequence[Row]):
    """The rows of one split. `groups` are each row's documents; None: every document is a row of its own.

    `parts` names the files of a mixture, each with the number of its first record; rows never mix parts.
    """

    def __init__(
        self,
        documents: Documents,
        groups: Groups | None,
        report: DataReport,
        parts: Sequence[tuple[str, int]] = (),
    ) -> None:
        self._documents = documents
        self.parts = tuple(parts)
        self.packed = groups is not None
        self.report = report
        if groups is None:
            self._order = np.arange(len(documents), dtype=np.int64)
            self._cuts = np.arange(len(documents) + 1, dtype=np.int64)
        else:
            self._order, self._cuts = groups

    def __len__(self) -> int:
        return len(self._cuts) - 1

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        if isinstance(index, slice):
            return [self[at] for at in range(*index.indices(len(self)))]
        at = int(index) + (len(self) if index < 0 else 0)
        if not 0 <= at < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        numbers = self._order[self._cuts[at] : self._cuts[at + 1]].tolist()
        held = self._documents
        parts = [slice(int(held.starts[number]), int(held.starts[number + 1])) for number in numbers]
        return Row(
            id=at,
            input_ids=np.concatenate([held.ids[part] for part in parts]),
            labels=np.concatenate([held.labels[part] for part in parts]),
            document_lengths=tuple(part.stop - part.start for part in parts),
            sources=tuple(int(held.sources[number]) for number in numbers),
        )

    @property
    def rows(self) -> Sequence[Row]:
        """The training rows, in a fixed order."""
        return self

    @cached_property
    def documents(self) -> Sequence[Row]:
        """The documents before packing, in the file's order, each as a row of its own."""
        return self if not self.packed else RowSet(self._documents, None, self.report)

    @cached_property
    def lengths(self) -> np.ndarray:
        """Tokens of each row, int64 [rows]."""
        return self._sums(self._documents.lengths)

    @cached_property
    def trained(self) -> np.ndarray:
        """Trained tokens of each row, int64 [rows]."""
        return self._sums(self._documents.trained)

    def _sums(self, values: np.ndarray) -> np.ndarray:
        return np.diff(np.concatenate([[0], np.cumsum(values[self._order])])[self._cuts])

    @cached_property
    def part_rows(self) -> dict[str, int]:
        """Rows of each part of a mixture, in the order in which they stand here."""
        firsts = [first for _, first in self.parts]
        counts = np.bincount(
            np.searchsorted(firsts, self._documents.sources[self._order[self._cuts[:-1]]], side="right") - 1,
            minlength=len(firsts),
        )
        return {name: int(count) for (name, _), count in zip(self.parts, counts, strict=True)}

    @property
    def longest_row(self) -> int:
        """Tokens of the longest row."""
        return int(self.lengths.max())

    @property
    def longest_document(self) -> int:
        """Tokens of the longest document."""
        return int(self._documents.lengths.max())

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        """Everything that the rows are made of, by name; `of_arrays` makes them again."""
        held = self._documents
        return {
            "ids": held.ids, "labels": held.labels, "starts": held.starts, "sources": held.sources,
            "order": self._order, "cuts": self._cuts,
        }  # fmt: skip

    @classmethod
    def of_arrays(cls, arrays: Mapping[str, np.ndarray], report: DataReport, parts: Sequence[tuple[str, int]]) -> Self:
        documents = Documents(*(arrays[name] for name in ("ids", "labels", "starts", "sources")))
        return cls(documents, (arrays["order"], arrays["cuts"]) if report.packed else None, report, parts)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 over token ids, labels and their cuts into documents and rows: equal only for equal data."""
        held = self._documents
        digest = hashlib.sha256()
        for array in (held.ids, held.labels, held.starts, self._order, self._cuts):
            digest.update(np.ascontiguousarray(array).data)
            digest.update(b"|")
        return digest.hexdigest()


@dataclass(frozen=True)
class Splits:
    """The training rows, and the evaluation sets by name: `valid` first, then those of evaluate.sets.

    `held` is what keeps the cache from removing the rows' entry while they are used.
    """

    train: RowSet
    evaluate: dict[str, RowSet]
    held: Any = None
