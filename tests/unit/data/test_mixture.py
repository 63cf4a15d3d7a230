"""Mixtures: proportions, exhaustion, order by (seed, epoch), counts by file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from finetune.config.check import check
from finetune.config.schema import Recipe
from finetune.data.dataset import prepare
from finetune.data.loader import Order, total_steps
from finetune.data.mixture import Mixture, counted, mixture_of, taken
from finetune.data.rows import Splits
from finetune.environment import Launch
from finetune.errors import DataError
from tests.conftest import alpaca_rows
from tests.unit.data.chat_forms import CHATML, tiny_tokenizer


@pytest.fixture
def mixed(write: Callable[..., str]) -> Callable[..., tuple[Recipe, Splits]]:
    def run(**data: Any) -> tuple[Recipe, Splits]:
        files = {"a": write(alpaca_rows(12), "a.jsonl"), "b": write(alpaca_rows(30, seed=1), "b.jsonl")}
        values = {"mixture": files, "template": "alpaca", "max_tokens": 256, **data}
        recipe = Recipe.model_validate({"model": {"path": "builtin:tiny"}, "data": values, "train": {"batch": 4}})
        return recipe, prepare(recipe, tiny_tokenizer(CHATML))

    return run


def test_without_weights_every_row_of_every_file_comes_once(mixed: Callable[..., Any]) -> None:
    recipe, splits = mixed()
    assert splits.train.part_rows == {"a": 12, "b": 30}
    assert mixture_of(splits.train, recipe.data) is None
    assert [row.sources[0] for row in splits.train] == list(range(42))
    notes = counted(splits.train, recipe.data).notes
    assert [count for note, count in notes.items() if note.startswith("rows of")] == [12, 30]


@pytest.mark.parametrize(
    ("weights", "policy", "rows"),
    [((1, 1), "stop", (12, 12)), ((1, 1), "repeat", (30, 30)), ((3, 1), "stop", (12, 4)), ((3, 1), "repeat", (90, 30)),
     ((1, 9), "stop", (3, 30)), ((1, 9), "repeat", (12, 108)), ((1e-6, 1), "stop", (1, 30))],
)  # fmt: skip
def test_an_epoch_takes_the_weights_proportion(
    mixed: Callable[..., Any], weights: tuple[float, float], policy: str, rows: tuple[int, int]
) -> None:
    assert taken([12, 30], weights, policy) == rows
    recipe, splits = mixed(weights=dict(zip("ab", weights, strict=True)), on_exhausted=policy)
    mixture = mixture_of(splits.train, recipe.data)
    assert mixture is not None
    assert mixture.taken == rows
    assert f"{rows[1]:,} an epoch" in " ".join(counted(splits.train, recipe.data).notes)
    order = Order(splits.train.lengths, 4, None, seed=3, mixture=mixture)
    drawn = order.permutation(0)
    assert ((drawn < 12).sum(), (drawn >= 12).sum()) == rows
    assert total_steps(order, 1, None) == -(-sum(rows) // 4)
    if policy == "stop":
        assert len(set(drawn.tolist())) == len(drawn), "no row comes twice"
    else:
        assert set(drawn.tolist()) == set(range(42)), "every row comes"


def test_the_order_is_a_function_of_seed_and_epoch_and_resumes_anywhere() -> None:
    mixture = Mixture((12, 30), (12, 4))
    order, again = (Order([1] * 42, 3, None, seed=5, mixture=mixture) for _ in range(2))
    other = Order([1] * 42, 3, None, seed=6, mixture=mixture)
    assert order.permutation(4).tolist() == again.permutation(4).tolist() != other.permutation(4).tolist()
    assert order.permutation(0).tolist() != order.permutation(1).tolist()
    whole = np.concatenate(order.batches(1))
    rest = [rows for rows, _ in again.steps(1, 6)]
    assert np.concatenate(rest).tolist() == whole[6:].tolist()
    assert [end for _, end in again.steps(1, 6)] == [9, 12, 15, 16]


def test_over_the_epochs_the_rows_of_a_file_come_equally_often() -> None:
    mixture = Mixture((12, 30), (12, 4))
    seen = Counter(row for epoch in range(15) for row in mixture.draw(0, epoch).tolist())
    assert {seen[row] for row in range(12)} == {15}
    assert {seen[row] for row in range(12, 42)} == {2}


def test_packed_rows_hold_one_file_each(mixed: Callable[..., Any]) -> None:
    _, splits = mixed(pack=True)
    for row in splits.train:
        assert len({source < 12 for source in row.sources}) == 1
    assert sum(splits.train.part_rows.values()) == len(splits.train)


def test_faults_of_a_mixture_name_the_file(mixed: Callable[..., Any], write: Callable[..., str]) -> None:
    bad = write([{"instruction": "x", "output": ""}], "bad.jsonl")
    with pytest.raises(DataError, match=r"bad\.jsonl line 1"):
        mixed(mixture={"a": write(alpaca_rows(3), "a.jsonl"), "bad": bad})
    good = write(alpaca_rows(3), "a.jsonl")
    recipe, splits = mixed(mixture={"a": good, "bad": bad}, weights={"a": 1, "bad": 1}, on_bad_row="skip")
    with pytest.raises(DataError, match="mixture's bad has no row left"):
        mixture_of(splits.train, recipe.data)


@pytest.mark.parametrize(
    ("data", "key"),
    [
        ({"mixture": {"a": "x"}, "path": "y"}, "data.path, data.mixture"),
        ({"mixture": {"a": "x"}, "weights": {"b": 1}}, "data.weights.b"),
        ({"mixture": {"a": "x", "b": "y"}, "weights": {"a": 1}}, "data.weights"),
        ({"path": "x", "on_exhausted": "repeat"}, "data.on_exhausted"),
        ({"path": "x", "streaming": "true"}, "data.streaming, train.max_steps"),
        ({"path": "x", "streaming": "true", "valid_share": 0.1}, "data.streaming, data.valid_share"),
        ({"mixture": {"a": "x"}, "streaming": "true"}, "data.streaming, data.mixture"),
        ({"path": "x", "shuffle_buffer": 3}, "data.shuffle_buffer"),
    ],
)
def test_keys_that_contradict_are_named(data: dict[str, Any], key: str) -> None:
    recipe = Recipe.model_validate({"model": {"path": "m"}, "data": data, "train": {"batch": 1}})
    assert key in [fault.where for fault in check(recipe, None, Launch())]


@pytest.mark.parametrize("weights", [(1e-9, 1), (1, 1e-9), (5e-324, 1e308), (1e-320, 1e-300)])
def test_weights_that_repeat_a_file_without_end_are_refused(
    mixed: Callable[..., Any], weights: tuple[float, float]
) -> None:
    recipe, splits = mixed(weights=dict(zip("ab", weights, strict=True)), on_exhausted="repeat")
    with pytest.raises(DataError, match=r"data\.weights: an epoch would be .* rows"):
        mixture_of(splits.train, recipe.data)
    assert sum(taken([12, 30], weights, "stop")) in (13, 31)


def test_weights_that_are_tiny_alike_are_even(mixed: Callable[..., Any]) -> None:
    assert taken([12, 30], (1e-320, 1e-320), "repeat") == (30, 30)


def test_an_epoch_too_short_for_its_weights_is_told_with_the_shares(mixed: Callable[..., Any]) -> None:
    recipe, splits = mixed(weights={"a": 1, "b": 1000})
    (warning,) = counted(splits.train, recipe.data).warnings
    assert warning == (
        "an epoch of 31 rows cannot keep to data.weights; it takes a 3.23 % instead of 0.0999 %, "
        "b 96.8 % instead of 99.9 %"
    )
    recipe, splits = mixed(weights={"a": 3, "b": 1})
    assert counted(splits.train, recipe.data).warnings == ()


def test_a_missing_column_is_told_of_the_file_that_lacks_it(write: Callable[..., str]) -> None:
    files = {"a": write(alpaca_rows(3), "a.jsonl"), "b": write([{"instruction": "x", "answer": "y"}], "b.jsonl")}
    values = {"mixture": files, "template": "alpaca", "max_tokens": 256}
    recipe = Recipe.model_validate({"model": {"path": "builtin:tiny"}, "data": values})
    with pytest.raises(DataError, match=r"b\.jsonl line 1: the column 'output' .*columns found: instruction, answer"):
        prepare(recipe, tiny_tokenizer(CHATML))
