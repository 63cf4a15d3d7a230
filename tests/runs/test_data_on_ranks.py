"""Several ranks and one set of data: prepared once, waited for without a collective, stopped together; streams resumed."""

from __future__ import annotations

import json
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import finetune
from finetune.config.schema import Recipe
from finetune.data import opening
from finetune.errors import ConfigError, DataError
from finetune.train import start
from tests.conftest import alpaca_rows, changed, write_jsonl
from tests.runs.ranks import endings, run_ranks


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "data"


def losses(folder: Path) -> list[float]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if "loss" in line]


def test_two_ranks_prepare_once_and_train_as_one(tiny: dict[str, Any], place: Path, tmp_path: Path) -> None:
    one = finetune.run(changed(tiny, run__dir=str(tmp_path / "one"))).dir
    entry = [folder for folder in place.iterdir() if folder.is_dir()]
    assert len(entry) == 1
    run_ranks(changed(tiny, run__dir=str(tmp_path / "two")), 2)
    assert [folder for folder in place.iterdir() if folder.is_dir()] == entry
    assert losses(tmp_path / "two") == pytest.approx(losses(one), rel=1e-5)


@pytest.mark.parametrize("cache", [True, False])
def test_b59_ranks_wait_longer_than_a_collective_may(tiny: dict[str, Any], cache: bool) -> None:
    """Case B59, scaled: collectives end after 3 seconds, and rank 0 takes 6 to prepare."""
    init, make = dist.init_process_group, opening.make_splits

    def slow(rank: int) -> None:
        dist.init_process_group = lambda *given, **named: init(*given, **named, timeout=timedelta(seconds=3))

        def prepared(*given: Any) -> Any:
            time.sleep(6 if rank == 0 else 0)
            return make(*given)

        opening.make_splits = prepared

    found = endings(changed(tiny, data__cache=cache, train__max_steps=2), 2, slow)
    assert [ending["steps"] for ending in found] == [2, 2], found


@pytest.mark.parametrize(("ranks", "cache"), [(2, True), (4, True), (2, False)])
def test_b60_a_bad_row_on_rank_0_stops_all_with_its_message(tiny: dict[str, Any], ranks: int, cache: bool) -> None:
    make = opening.make_splits

    def bad(rank: int) -> None:
        def prepared(*given: Any) -> Any:
            if rank == 0:
                raise DataError("the answer is empty", "train.jsonl line 7")
            return make(*given)

        opening.make_splits = prepared

    started = time.monotonic()
    found = endings(changed(tiny, data__cache=cache), ranks, bad)
    assert [str(error) for error in found] == ["train.jsonl line 7: the answer is empty"] * ranks
    assert all(isinstance(error, DataError) and error.everywhere for error in found)
    assert time.monotonic() - started < 30


@pytest.mark.parametrize("pack", [False, True])
def test_b69_a_streamed_run_resumed_twice_is_the_same_to_the_bit(
    tiny: dict[str, Any], tmp_path: Path, pack: bool
) -> None:
    write_jsonl(tmp_path / "train.jsonl", alpaca_rows(60))
    streamed = changed(
        tiny, data__streaming=True, data__shuffle_buffer=16, data__pack=pack, data__max_tokens=128,
        adapter__dropout=0.1, train__batch=3, train__max_steps=28,
    )  # fmt: skip
    parts = changed(streamed, run__dir=str(tmp_path / "parts"), data__valid_path=None)
    for steps in (5, 13, 28):
        # The schedule is one of 28 steps: a constant rate, so that a shorter run has the same.
        finetune.run(changed(parts, train__max_steps=steps, schedule__name="constant", resume="auto"))
    straight = finetune.run(
        changed(streamed, run__dir=str(tmp_path / "straight"), data__valid_path=None, schedule__name="constant")
    ).dir
    assert losses(tmp_path / "parts") == losses(straight)
    assert len(losses(straight)) == 28


def test_a_mixture_trains_and_resumes_to_the_bit(tiny: dict[str, Any], tmp_path: Path) -> None:
    write_jsonl(tmp_path / "b.jsonl", alpaca_rows(40, seed=3))
    mixture = {"a": str(tmp_path / "train.jsonl"), "b": str(tmp_path / "b.jsonl")}
    mixed = changed(
        tiny, data__path=None, data__mixture=mixture, data__weights={"a": 1, "b": 3}, schedule__name="constant"
    )
    whole = finetune.run(changed(mixed, run__dir=str(tmp_path / "whole"), train__max_steps=24)).dir
    parts = changed(mixed, run__dir=str(tmp_path / "parts"))
    for steps in (7, 15, 24):
        finetune.run(changed(parts, train__max_steps=steps, resume="auto"))
    assert losses(tmp_path / "parts") == losses(whole)


@pytest.mark.parametrize("how", ["cache", "plain", "streaming"])
def test_ranks_with_other_data_files_are_refused(tiny: dict[str, Any], tmp_path: Path, how: str) -> None:
    """Two machines with the same recipe and another line in a file; one message, on every rank, before the first step."""

    def elsewhere(rank: int) -> None:
        if rank != 1:
            return
        rows = alpaca_rows(24)
        rows[5]["output"] = "another answer"
        other = write_jsonl(tmp_path / "other.jsonl", rows)
        opens = start.open_data

        def opened(recipe: Recipe, *given: Any) -> Any:
            data = recipe.data.model_copy(update={"path": str(other)})
            return opens(recipe.model_copy(update={"data": data}), *given)

        start.open_data = opened
        opening.cache.load = lambda entry: None  # another machine does not see rank 0's entry

    keys = {"data__cache": how == "cache", "data__streaming": how == "streaming"}
    found = endings(changed(tiny, train__max_steps=2, **keys), 2, elsewhere)
    assert [str(error).splitlines()[0] for error in found] == [
        "data.path: the rows of train on rank 1 are others than those on rank 0"
    ] * 2
    assert all(isinstance(error, DataError) and error.everywhere for error in found)


def packed_rows(folder: Path, documents: int) -> str:
    """12 rows of the text template whose documents come to 60 tokens each; so many of them fill a row of 300."""
    rows = [{"text": chr(97 + n % 26) * 58} for n in range(12 * documents)]
    return str(write_jsonl(folder / "packed.jsonl", rows))


@pytest.mark.parametrize("documents", [5, 1])
def test_b15_a_packed_row_gives_its_loss_on_any_number_of_ranks(
    tiny: dict[str, Any], tmp_path: Path, documents: int
) -> None:
    """Case B15: 5 documents in each row, or one; the first step's loss on 2 ranks is that of one."""
    recipe = changed(
        tiny,
        data={"path": packed_rows(tmp_path, documents), "template": "text", "train_on": "all", "pack": True,
              "max_tokens": 60 * documents + 5, "valid_share": 0.1},
        train={"batch": 4, "max_steps": 2}, plan__micro_batch=1,
    )  # fmt: skip
    alone = finetune.run(changed(recipe, run__dir=str(tmp_path / "one"))).dir
    run_ranks(changed(recipe, run__dir=str(tmp_path / "two")), 2)
    one, two = losses(alone), losses(tmp_path / "two")
    assert two[0] == pytest.approx(one[0], abs=1e-4)
    assert two == pytest.approx(one, abs=1e-4)


@pytest.mark.parametrize("key", ["plan.tensor", "plan.context", "plan.shard"])
def test_b15_what_would_cut_a_row_is_refused(tiny: dict[str, Any], key: str) -> None:
    """Case B15: no mode that cuts rows or matrices over ranks is offered; each is refused by name before anything runs."""
    section, name = key.split(".")
    with pytest.raises(ConfigError, match=rf"{key}=2 is not built yet"):
        finetune.run(changed(tiny, data__pack=True, **{f"{section}__{name}": 2}))
