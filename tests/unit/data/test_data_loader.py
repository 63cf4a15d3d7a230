"""Steps from rows: complete, repeatable, resumable at any row; and batches padded on the right."""

from __future__ import annotations

import numpy as np
import pytest

from finetune.contracts import IGNORED, Row
from finetune.data.loader import Order, collate, micro_batches, total_steps


def seen(batches: list[np.ndarray]) -> list[int]:
    return [int(row) for batch in batches for row in batch]


def test_b04_the_incomplete_last_step_is_kept() -> None:
    order = Order([1] * 7, batch=4, batch_tokens=None, seed=0)
    assert [len(batch) for batch in order.batches(0)] == [4, 3]
    assert total_steps(order, epochs=1, max_steps=None) == 2 == total_steps(order, None, None)


@pytest.mark.parametrize(
    ("epochs", "max_steps", "steps"),
    [
        (3, None, 6),
        (1.5, None, 3),
        (0.25, None, 1),
        (0.75, None, 2),
        (None, 9, 9),
        (3, 4, 4),
        (1, 9, 2),
        (2.1, None, 5),
    ],
)
def test_total_steps(epochs: float | None, max_steps: int | None, steps: int) -> None:
    assert total_steps(Order([1] * 7, 4, None, seed=0), epochs, max_steps) == steps


def test_a_run_has_a_step_and_epochs_beyond_max_steps_are_not_counted() -> None:
    order = Order([1] * 7, 4, None, seed=0)
    assert total_steps(order, 1e-12, None) == 1
    assert total_steps(order, 1e12, 3) == 3
    assert total_steps(Order([4] * 7, None, 8, seed=0), 1e12, 5) == 5


def test_total_steps_of_token_batches_are_the_sum_over_epochs() -> None:
    order = Order(np.random.default_rng(0).integers(1, 60, 50), batch=None, batch_tokens=100, seed=3)
    sizes = [len(order.batches(epoch)) for epoch in range(4)]
    assert total_steps(order, 3, None) == sum(sizes[:3])
    assert total_steps(order, 3.5, None) == sum(sizes[:3]) + -(-sizes[3] // 2)


def test_token_batches_take_rows_while_they_fit() -> None:
    order = Order([4, 3, 3, 9, 20, 1, 1], batch=None, batch_tokens=10, seed=0, shuffle=False)
    assert [batch.tolist() for batch in order.batches(0)] == [[0, 1, 2], [3], [4], [5, 6]]


def test_epochs_have_their_own_order_by_seed_and_number_alone() -> None:
    order, again = Order([1] * 64, 4, None, seed=5), Order([1] * 64, 8, None, seed=5)
    assert sorted(order.permutation(0).tolist()) == list(range(64))
    assert order.permutation(3).tolist() == again.permutation(3).tolist() != order.permutation(2).tolist()
    assert order.permutation(0).tolist() != Order([1] * 64, 4, None, seed=6).permutation(0).tolist()
    assert Order([1] * 3, 1, None, seed=5, shuffle=False).permutation(1).tolist() == [0, 1, 2]
    assert order.permutation(0)[:6].tolist() == Order([1] * 64, 4, None, 5).permutation(0)[:6].tolist()


@pytest.mark.parametrize("ranks", [1, 2])
def test_b69_a_resumed_epoch_goes_on_with_the_rows_not_seen(ranks: int) -> None:
    whole = Order([1] * 64, 2, None, seed=1).batches(0)
    before = whole[:20]
    after = Order([1] * 64, 2, None, seed=1).batches(0, start=len(seen(before)))
    assert seen(before) + seen(after) == seen(whole)
    assert sorted(seen(whole)) == list(range(64))
    shared = [row for batch in whole for rank in range(ranks) for row in seen(micro_batches(batch, rank, ranks, 1))]
    assert sorted(shared) == list(range(64))


def test_b71_later_epochs_see_all_rows() -> None:
    order = Order([1] * 12, 3, None, seed=2)
    assert len(seen(order.batches(0, start=9))) == 3
    for epoch in (1, 2):
        assert sorted(seen(order.batches(epoch))) == list(range(12))


@pytest.mark.parametrize("batch", [1, 2, 4, 16])
def test_b84_another_batch_size_or_number_of_ranks_repeats_and_loses_nothing(batch: int) -> None:
    before = Order([1] * 61, 8, None, seed=3).batches(0)[:4]
    after = Order([1] * 61, batch, None, seed=3).batches(0, start=32)
    assert seen(before) + seen(after) == Order([1] * 61, 8, None, seed=3).permutation(0).tolist()
    tokens = Order([1] * 61, None, 5, seed=3).batches(0, start=32)
    assert seen(tokens) == seen(after)


def test_b122_uneven_shares_of_ranks() -> None:
    rows = np.arange(7)
    shares = [micro_batches(rows, rank, 2, 2) for rank in range(2)]
    assert [[part.tolist() for part in share] for share in shares] == [[[0, 2], [4, 6]], [[1, 3], [5]]]
    assert micro_batches([5], 1, 2, 4) == []


def test_exactly_one_kind_of_batch() -> None:
    for batch, tokens in ((None, None), (1, 1)):
        with pytest.raises(ValueError, match=r"either"):
            Order([1], batch, tokens, seed=0)


def row(number: int, *lengths: int) -> Row:
    ids = np.arange(sum(lengths), dtype=np.int32) + 10
    labels = ids.copy()
    labels[np.cumsum([0, *lengths[:-1]])] = IGNORED
    return Row(number, ids, labels, lengths, tuple(range(len(lengths))))


def test_b24_batches_are_padded_on_the_right() -> None:
    batch = collate([row(7, 3), row(9, 1)], pad_id=2)
    assert batch.input_ids.tolist() == [[10, 11, 12], [10, 2, 2]]
    assert batch.labels.tolist() == [[-100, 11, 12], [-100, -100, -100]]
    assert batch.row_ids.tolist() == [7, 9]
    assert batch.lengths == (3, 1)
    assert batch.document_ids is None
    assert batch.positions is None
    assert str(batch.input_ids.dtype) == str(batch.labels.dtype) == str(batch.row_ids.dtype) == "torch.int64"


def test_b11_documents_and_padding_have_their_own_numbers_and_positions() -> None:
    batch = collate([row(0, 2, 3), row(1, 4)], pad_id=0)
    assert batch.document_ids is not None
    assert batch.positions is not None
    assert batch.document_ids.tolist() == [[0, 0, 1, 1, 1], [0, 0, 0, 0, 1]]
    assert batch.positions.tolist() == [[0, 1, 0, 1, 2], [0, 1, 2, 3, 0]]
    assert batch.labels.tolist()[0] == [-100, 11, -100, 13, 14]
