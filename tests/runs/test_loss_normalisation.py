"""Losses and gradients do not depend on micro-batch, accumulation, evaluation batch or number of processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import finetune
from tests.conftest import changed, method
from tests.runs.history import column, last_state, lines
from tests.runs.ranks import run_ranks


@pytest.mark.parametrize("kind", ["none", "lora"])
def test_b01_accumulation_equals_one_batch(tiny: dict[str, Any], tmp_path: Path, kind: str) -> None:
    """Case B01: rows of uneven length; micro-batches of 1, 2, 4 give the losses and weights of one batch."""
    recipe = method(tiny, kind)
    folders = {}
    for micro in (4, 2, 1):
        folders[micro] = tmp_path / f"micro{micro}"
        finetune.run(changed(recipe, plan__micro_batch=micro, run__dir=str(folders[micro])))
    for micro in (2, 1):
        assert column(folders[micro], "loss") == pytest.approx(column(folders[4], "loss"), abs=1e-5)
        assert column(folders[micro], "grad_norm") == pytest.approx(column(folders[4], "grad_norm"), rel=1e-4)
        for name, weight in last_state(folders[4])["trainable"].items():
            torch.testing.assert_close(last_state(folders[micro])["trainable"][name], weight, atol=1e-4, rtol=0)


def test_b02_ranks_give_the_losses_of_one_process(tiny: dict[str, Any], tmp_path: Path) -> None:
    """Case B02: 1, 2 and 4 ranks, with uneven shares (5 rows a step), the same losses, gradient norms and evaluation."""
    recipe = changed(tiny, train__batch=5, train__max_steps=4, plan__micro_batch=2, optimizer__lr=1e-3)
    runs = {}
    for ranks in (1, 2, 4):
        runs[ranks] = tmp_path / f"ranks{ranks}"
        run_ranks(changed(recipe, run__dir=str(runs[ranks])), ranks)
    for ranks in (2, 4):
        for name in ("loss", "grad_norm", "eval_loss", "trained_tokens", "tokens"):
            assert column(runs[ranks], name) == pytest.approx(column(runs[1], name), abs=1e-5), (ranks, name)


def test_b120_schedule_does_not_depend_on_ranks(tiny: dict[str, Any], tmp_path: Path) -> None:
    """Case B120: a linear schedule of 10 steps on 2 ranks still takes 10 steps."""
    folder = tmp_path / "linear"
    recipe = changed(tiny, schedule__name="linear", train__max_steps=10, optimizer__lr=1.0e-3, run__dir=str(folder))
    run_ranks(recipe, 2)
    assert column(folder, "lr") == pytest.approx([1e-3 * (1 - k / 10) for k in range(10)], rel=1e-9)


def test_b04_incomplete_last_batch_is_a_step(tiny: dict[str, Any], tmp_path: Path) -> None:
    """Case B04: 7 rows in batches of 4 are 2 steps; the second equals a batch of the 3 rows that remain."""
    recipe = changed(tiny, data__max_rows=7, train__batch=4, train__epochs=1, plan__micro_batch=1)
    del recipe["train"]["max_steps"]
    summary = finetune.run(recipe).summary
    assert summary["steps"] == 2
    whole = finetune.run(changed(recipe, plan__micro_batch=4, run__dir=str(tmp_path / "whole"))).summary
    assert summary["loss_last"] == pytest.approx(whole["loss_last"], abs=1e-5)
    lrs = column(tmp_path / "run", "lr")
    assert lrs == pytest.approx([1e-2, 0.5e-2])


@pytest.mark.parametrize("pack", [False, True])
def test_b06_b08_evaluation_is_one_value(tiny: dict[str, Any], tmp_path: Path, pack: bool) -> None:
    """Cases B06, B08: 7 held-out rows in batches of 1, 2, 3, on 1 and 2 ranks: one value, each row counted once."""
    values = []
    for micro in (1, 2, 3):
        folder = tmp_path / f"eval{micro}"
        finetune.run(changed(tiny, train__max_steps=1, plan__micro_batch=micro, data__pack=pack, run__dir=str(folder)))
        values.append(column(folder, "eval_loss")[0])
    folder = tmp_path / "eval_ranks"
    run_ranks(changed(tiny, train__max_steps=1, plan__micro_batch=2, data__pack=pack, run__dir=str(folder)), 2)
    values.append(column(folder, "eval_loss")[0])
    assert values == pytest.approx([values[0]] * 4, abs=1e-6)


def test_packed_evaluation_equals_unpacked(tiny: dict[str, Any], tmp_path: Path) -> None:
    packed = finetune.run(changed(tiny, train__max_steps=1, data__pack=True, run__dir=str(tmp_path / "packed")))
    plain = finetune.run(changed(tiny, train__max_steps=1, run__dir=str(tmp_path / "plain")))
    assert packed.summary["eval_before"]["eval_loss"] == pytest.approx(
        plain.summary["eval_before"]["eval_loss"], abs=1e-5
    )


def test_lora_dropout_does_not_depend_on_mechanics(tiny: dict[str, Any], tmp_path: Path) -> None:
    """Dropout 0.1 gives the same losses for micro-batch 1, 2, 4, with and without checkpointing; and it does something."""
    recipe = changed(tiny, adapter__dropout=0.1, optimizer__lr=1e-3)
    finetune.run(changed(recipe, plan__micro_batch=4, run__dir=str(tmp_path / "reference")))
    wanted = column(tmp_path / "reference", "loss")
    for micro, checkpointing in ((1, False), (2, True), (4, True)):
        folder = tmp_path / f"m{micro}{checkpointing}"
        levers = {"plan__micro_batch": micro, "plan__activation_checkpointing": checkpointing, "run__dir": str(folder)}
        finetune.run(changed(recipe, **levers))
        assert column(folder, "loss") == pytest.approx(wanted, abs=1e-5)
    finetune.run(changed(recipe, adapter__dropout=0.0, run__dir=str(tmp_path / "without")))
    assert column(tmp_path / "without", "loss") != pytest.approx(wanted, abs=1e-4)


def test_batch_tokens_takes_rows_while_they_fit(tiny: dict[str, Any], tmp_path: Path) -> None:
    recipe = changed(tiny, train__batch_tokens=600)
    del recipe["train"]["batch"]
    finetune.run(recipe)
    tokens = column(tmp_path / "run", "tokens")
    assert len(tokens) == 8
    assert max(tokens) <= 600
    assert all(line["trained_tokens"] < line["tokens"] for line in lines(tmp_path / "run") if "loss" in line)
