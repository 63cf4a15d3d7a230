"""Full fine-tuning with weights in 16 bits, and every optimizer, through the whole run: it learns, and resumes to the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import finetune
from finetune.errors import CheckpointError, StoppedError
from finetune.optim.table import OPTIMIZERS
from tests.conftest import changed, method
from tests.runs.history import column, last_state, same_bits
from tests.runs.test_resume import interrupted, stop_at


@pytest.mark.parametrize("trained", ["stochastic", "split", "bf16"])
@pytest.mark.parametrize("name", ["adamw", "adamw8bit", "muon"])
def test_16_bit_weights_learn_and_resume_to_the_same_bits(
    tiny: dict[str, Any], tmp_path: Path, trained: str, name: str
) -> None:
    recipe = changed(method(tiny, "none"), model__trained=trained, optimizer__name=name, train__max_steps=5)
    straight = tmp_path / "straight"
    finetune.run(changed(recipe, run__dir=str(straight)))
    losses = column(straight, "loss")
    assert losses[-1] < losses[0] - 0.05
    state = last_state(straight)
    assert {tensor.dtype for tensor in state["trainable"].values()} == {torch.bfloat16}
    rests = [tensor for key, tensor in state["optimizer"].items() if key.endswith("/correction")]
    assert len(rests) == (len(state["trainable"]) if trained == "split" else 0)
    interrupted(recipe, tmp_path / "stopped", 3)
    assert same_bits(straight, tmp_path / "stopped")


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name not in ("adamw", "adamw8bit", "paged_adamw8bit")])
def test_every_optimizer_resumes_to_the_same_bits(tiny: dict[str, Any], tmp_path: Path, name: str) -> None:
    recipe = changed(method(tiny, "none"), optimizer__name=name, train__max_steps=4)
    finetune.run(changed(recipe, run__dir=str(tmp_path / "straight")))
    interrupted(recipe, tmp_path / "stopped", 2)
    assert same_bits(tmp_path / "straight", tmp_path / "stopped")


def test_group_factors_and_scaled_rates_reach_the_steps(tiny: dict[str, Any], tmp_path: Path) -> None:
    recipe = changed(method(tiny, "none"), optimizer__groups={"*layers.0.*": "lr_factor=0"}, train__max_steps=2)
    recipe = changed(recipe, optimizer__scale_lr="linear", optimizer__base_batch=2, schedule__name="constant")
    finetune.run(changed(recipe, run__dir=str(tmp_path / "one")))
    finetune.run(changed(recipe, run__dir=str(tmp_path / "two"), train__max_steps=1))
    assert column(tmp_path / "one", "lr") == [2e-3, 2e-3]
    one, two = (last_state(tmp_path / name)["trainable"] for name in ("one", "two"))
    frozen = {name for name in one if torch.equal(one[name], two[name])}
    assert frozen == {name for name in one if "layers.0." in name}


def test_another_way_of_keeping_weights_is_refused_on_resume(
    tiny: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = changed(method(tiny, "none"), model__trained="split", run__dir=str(tmp_path / "run"))
    stop_at(monkeypatch, 2)
    with pytest.raises(StoppedError):
        finetune.run(recipe)
    with pytest.raises(CheckpointError, match=r"model\.trained: 'split' in the checkpoint, 'stochastic' now"):
        finetune.run(changed(recipe, model__trained="stochastic"), "resume=auto")
