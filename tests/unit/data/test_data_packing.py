"""Best-fit packing: nothing lost, nothing too long, dense and repeatable."""

from __future__ import annotations

import numpy as np
import pytest

from finetune.data.packing import pack


def test_best_fit_takes_the_row_with_the_least_room() -> None:
    assert pack([6, 5, 4, 3, 2], 10) == [[0, 2], [1, 3, 4]]
    assert pack([7, 6, 3, 2, 1], 10) == [[0, 2], [1, 3, 4]]
    assert pack([], 8) == []
    assert pack([8], 8) == [[0]]
    assert pack([1] * 5, 2) == [[0, 1], [2, 3], [4]]


def test_every_document_once_and_no_row_too_long() -> None:
    lengths = np.random.default_rng(0).integers(1, 2049, 3000).tolist()
    rows = pack(lengths, 2048)
    assert sorted(index for row in rows for index in row) == list(range(3000))
    assert max(sum(lengths[index] for index in row) for row in rows) <= 2048
    assert all(row == sorted(row) for row in rows)
    assert [row[0] for row in rows] == sorted(row[0] for row in rows)
    assert rows == pack(lengths, 2048)


def test_short_documents_fill_their_rows() -> None:
    lengths = np.random.default_rng(1).integers(20, 400, 5000).tolist()
    rows = pack(lengths, 2048)
    assert sum(lengths) / (len(rows) * 2048) > 0.99
    assert len(rows) == -(-sum(lengths) // 2048), "no packing of these needs fewer rows"


@pytest.mark.parametrize("length", [0, 9])
def test_a_document_that_no_row_takes_is_refused(length: int) -> None:
    with pytest.raises(ValueError, match=f"document 1 has {length} tokens"):
        pack([3, length], 8)


def test_a_huge_limit_costs_nothing() -> None:
    assert pack([5, 3, 8], 10**15) == [[0, 1, 2]]
