"""fp16 and tf32: what is kept in which type, the loss scale's rules, and that no setting of torch is left behind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import finetune
from finetune.errors import DivergedError
from finetune.kernels.precision import DTYPES, LossScale, compute, loss_scale, products
from tests.conftest import alpaca_rows, changed, method, write_jsonl
from tests.runs.history import column, lines, same_bits
from tests.runs.ranks import run_ranks
from tests.runs.test_resume import interrupted


def test_tf32_is_set_inside_and_restored_after_also_by_an_error() -> None:
    before = torch.get_float32_matmul_precision()
    with compute(torch.device("cpu"), "tf32"):
        assert torch.get_float32_matmul_precision() == "high"
        assert not torch.is_autocast_enabled("cpu")
    assert torch.get_float32_matmul_precision() == before
    with pytest.raises(RuntimeError), products("tf32"):
        raise RuntimeError
    assert torch.get_float32_matmul_precision() == before


def test_the_scale_halves_at_an_overflow_and_grows_after_patience() -> None:
    scale = LossScale(scale=8.0, patience=3)
    scale.note(True)
    assert (scale.scale, scale.skipped, scale.skipped_in_a_row) == (4.0, 1, 1)
    for _ in range(2):
        scale.note(False)
    assert (scale.scale, scale.skipped_in_a_row) == (4.0, 0)
    scale.note(False)
    assert (scale.scale, scale.clean, scale.skipped) == (8.0, 0, 1)
    assert LossScale(**scale.facts()) == scale
    assert loss_scale("bf16") is loss_scale("fp32") is loss_scale("tf32") is None


@pytest.mark.parametrize("kind", ["none", "lora"])
def test_b125_trained_weights_are_fp32_under_fp16_and_frozen_ones_fp16(tiny: dict[str, Any], kind: str) -> None:
    from finetune.config.load import load_recipe
    from finetune.models.load import load_model

    recipe = load_recipe(changed(method(tiny, kind), model__precision="fp16"))
    model = load_model(recipe, "cpu", "fp16")
    trained = {p.dtype for p in model.module.parameters() if p.requires_grad}
    frozen = {p.dtype for p in model.module.parameters() if not p.requires_grad}
    assert trained == {torch.float32}
    assert frozen == (set() if kind == "none" else {DTYPES["fp16"]})


@pytest.mark.parametrize("kind", ["none", "lora"])
def test_b125_fp16_trains_as_fp32_does_and_shows_its_scale(tiny: dict[str, Any], tmp_path: Path, kind: str) -> None:
    recipe = method(tiny, kind)
    finetune.run(changed(recipe, run__dir=str(tmp_path / "fp32")))
    finetune.run(changed(recipe, model__precision="fp16", run__dir=str(tmp_path / "fp16")))
    assert column(tmp_path / "fp16", "loss") == pytest.approx(column(tmp_path / "fp32", "loss"), rel=0.01)
    assert column(tmp_path / "fp16", "grad_norm") == pytest.approx(column(tmp_path / "fp32", "grad_norm"), rel=0.05)
    steps = [line for line in lines(tmp_path / "fp16") if "loss" in line]
    assert [line["loss_scale"] for line in steps] == [65536.0] * 8
    assert [line["skipped_steps"] for line in steps] == [0] * 8
    assert "loss_scale" not in lines(tmp_path / "fp32")[1]


def test_tf32_on_a_cpu_is_fp32_and_leaves_nothing_behind(tiny: dict[str, Any], tmp_path: Path) -> None:
    before = torch.get_float32_matmul_precision()
    finetune.run(changed(tiny, run__dir=str(tmp_path / "fp32")))
    finetune.run(changed(tiny, model__precision="tf32", run__dir=str(tmp_path / "tf32")))
    assert column(tmp_path / "tf32", "loss") == pytest.approx(column(tmp_path / "fp32", "loss"), rel=1e-2)
    assert torch.get_float32_matmul_precision() == before


def test_b131_a_run_that_only_overflows_stops_with_advice(
    tiny: dict[str, Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Case B131: gradients beyond fp16 in every step: each is skipped, counted and shown, and after 20 the run stops."""
    recipe = changed(tiny, model__precision="fp16", adapter__alpha=4e12, train__max_steps=40)
    recipe["data"].pop("valid_path")
    with pytest.raises(DivergedError) as caught:
        finetune.run(recipe)
    text = str(caught.value)
    assert "step 20: 20 steps in a row overflowed in fp16" in text
    assert "model.precision=bf16" in text
    assert "optimizer.lr" in text
    steps = [line for line in lines(tmp_path / "run") if "loss" in line]
    assert [line["skipped_steps"] for line in steps] == list(range(1, 20))
    assert [line["loss_scale"] for line in steps] == [65536.0 / 2**n for n in range(19)]
    assert "step 3: overflow in fp16, skipped (3 so far); the loss scale is now 8192" in capfd.readouterr().err


@pytest.fixture
def calibrating(tiny: dict[str, Any], tmp_path: Path) -> dict[str, Any]:
    """A run whose first steps overflow until the scale has come down: a large rank's alpha multiplies the gradient."""
    write_jsonl(tmp_path / "train.jsonl", alpaca_rows(24))
    return changed(
        tiny,
        model__precision="fp16",
        adapter__alpha=2e4,
        optimizer__lr=1e-9,
        train__max_grad_norm=None,
        train__max_steps=12,
    )


def test_b131_skipped_steps_change_nothing_and_a_resumed_run_keeps_the_scale(
    calibrating: dict[str, Any], tmp_path: Path
) -> None:
    straight = tmp_path / "straight"
    finetune.run(changed(calibrating, run__dir=str(straight)))
    skipped = column(straight, "skipped_steps")
    assert 0 < skipped[-1] < 12
    assert skipped == sorted(skipped)
    interrupted(calibrating, tmp_path / "stopped", 3)
    assert same_bits(straight, tmp_path / "stopped")
    for name in ("loss", "loss_scale", "skipped_steps"):
        assert column(tmp_path / "stopped", name) == column(straight, name)


def test_all_ranks_skip_together(calibrating: dict[str, Any], tmp_path: Path) -> None:
    alone, several = tmp_path / "alone", tmp_path / "several"
    finetune.run(changed(calibrating, run__dir=str(alone)))
    run_ranks(changed(calibrating, run__dir=str(several)), 2)
    assert column(several, "skipped_steps") == column(alone, "skipped_steps")
    assert column(several, "loss_scale") == column(alone, "loss_scale")


def test_the_loss_of_a_skipped_step_is_in_no_summary(tmp_path: Path, calibrating: dict[str, Any]) -> None:
    finetune.run(calibrating)
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["loss_first"] > 0
    assert summary["loss_last"] > 0
