"""Streamed weights train as resident ones do: whole runs on the CPU, equal bit for bit under the same plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import finetune
from finetune.kernels import norms
from finetune.train import streamed_ends
from tests.conftest import changed, method
from tests.runs.history import column, last_state, same_bits

FAST = {"plan__fast_block": True}
OFFLOADED = {"plan__activation_offload": True}
BF16 = {"model__precision": "bf16"}
DROPPED = {"adapter__dropout": 0.1}
PACKED = {"data__pack": True, "data__max_tokens": 256}
VISIT = {"plan__head_placement": "visit"}
HERE = {"plan__embedding_placement": "device"}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    # name: what is trained, what both runs have, what the streamed one has beside it
    "full": ("none", {}, {}),
    "full fast": ("none", FAST, {"plan__slots": 2}),
    "full fast micro 1": ("none", {**FAST, "plan__micro_batch": 1}, OFFLOADED),
    "full fast micro 4": ("none", {**FAST, "plan__micro_batch": 4}, {"plan__resident_blocks": 1}),
    "full packed": ("none", PACKED, {"plan__resident_blocks": 1, **OFFLOADED}),
    "full fast packed": ("none", {**FAST, **PACKED}, {"plan__resident_blocks": 99}),
    "full adamw8bit": ("none", {"optimizer__name": "adamw8bit"}, OFFLOADED),
    "full fast adamw4bit": ("none", {**FAST, "optimizer__name": "adamw4bit"}, {}),
    "full fast adamwfp8": ("none", {**FAST, "optimizer__name": "adamwfp8"}, {"plan__slots": 2}),
    "full lion, clipped": ("none", {"optimizer__name": "lion", "train__max_grad_norm": 0.01}, {}),
    "full sgd, not clipped": ("none", {"optimizer__name": "sgd", "train__max_grad_norm": None}, OFFLOADED),
    "full groups": ("none", {**FAST, "optimizer__groups": {"*norm*": "weight_decay=0.2"}}, {}),
    "full fast stochastic": ("none", {**FAST, **BF16, "model__trained": "stochastic"}, OFFLOADED),
    "full split": ("none", {**BF16, "model__trained": "split", "optimizer__name": "adamw8bit"}, {}),
    "full fast bf16": ("none", {**FAST, **BF16, "model__trained": "bf16"}, {}),
    "full autocast": ("none", BF16, OFFLOADED),
    "lora": ("lora", DROPPED, {}),
    "lora fast": ("lora", {**FAST, **DROPPED}, OFFLOADED),
    "lora fast packed": ("lora", {**FAST, **PACKED, **DROPPED}, {"plan__resident_blocks": 1}),
    "lora fast nf4": ("lora", {**FAST, **DROPPED, "model__base": "nf4"}, {"plan__slots": 2}),
    "lora nf4 micro 1": ("lora", {"model__base": "nf4", "plan__micro_batch": 1}, {}),
    "lora fast int8": ("lora", {**FAST, "model__base": "int8"}, {}),
    "lora fp8": ("lora", {"model__base": "fp8"}, OFFLOADED),
    "full fast head visits": ("none", {**FAST, **HERE}, VISIT),
    "full head visits, packed, micro 1": (
        "none",
        {**PACKED, **HERE, "plan__micro_batch": 1, "train__max_grad_norm": 0.05},
        {**VISIT, **OFFLOADED},
    ),
    "full fast stochastic adamw8bit, head visits": (
        "none",
        {**FAST, **HERE, **BF16, "model__trained": "stochastic", "optimizer__name": "adamw8bit"},
        {**VISIT, "plan__resident_blocks": 99},
    ),
    "lora head visits": ("lora", DROPPED, VISIT),
    "lora fast packed head visits, micro 1": (
        "lora",
        {**FAST, **PACKED, "plan__micro_batch": 1},
        {**VISIT, **OFFLOADED},
    ),
    "lora fast nf4 head visits, plain loss": (
        "lora",
        {**FAST, "model__base": "nf4", "plan__loss_chunk": 0},
        VISIT,
    ),
    "lora some layers": ("lora", {**FAST, "adapter__targets": ["model.layers.1.mlp.*_proj"]}, OFFLOADED),
}


def ran(recipe: dict[str, Any], folder: Path, **changes: Any) -> Path:
    finetune.run(changed(recipe, run__dir=str(folder), **changes))
    return folder


def both(recipe: dict[str, Any], place: Path, name: str) -> tuple[Path, Path]:
    kind, shared, own = CASES[name]
    recipe = changed(method(recipe, kind), train__max_steps=3, plan__activation_checkpointing=True)
    recipe = changed(recipe, plan__micro_batch=2, plan__loss_chunk=64, optimizer__weight_decay=0.1)
    recipe = changed(recipe, **shared)
    if own.get("plan__resident_blocks") == 99:
        own = {**own, "plan__resident_blocks": 2}
    return (
        ran(recipe, place / "resident", plan__weights="resident"),
        ran(recipe, place / "streamed", plan__weights="streamed", **own),
    )


@pytest.mark.parametrize("name", CASES)
def test_streamed_runs_give_the_bits_of_resident_ones(tiny: dict[str, Any], tmp_path: Path, name: str) -> None:
    """Losses, gradient norms, held-out losses, weights and optimizer state."""
    resident, streamed = both(tiny, tmp_path, name)
    for figure in ("loss", "grad_norm", "eval_loss"):
        assert column(resident, figure) == column(streamed, figure)
    assert len(column(streamed, "loss")) == 3
    assert same_bits(resident, streamed)


@pytest.mark.parametrize("kind", ["none", "lora"])
@pytest.mark.parametrize("optimizer", ["adamw", "adamw8bit"])
def test_embedding_and_head_that_pass_in_parts(
    tiny: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, optimizer: str
) -> None:
    """Sums are made in another order: parts of 256 rows, tiles of 50 positions, groups of 300."""
    monkeypatch.setattr(norms, "TALL_ELEMENTS", 256 * 64)
    monkeypatch.setattr(streamed_ends, "TILE", 50)
    monkeypatch.setattr(streamed_ends, "TOGETHER", 300)
    recipe = changed(method(tiny, kind), train__max_steps=4, plan__activation_checkpointing=True)
    recipe = changed(recipe, plan__micro_batch=2, plan__fast_block=True, optimizer__name=optimizer)
    recipe = changed(recipe, optimizer__epsilon=1e-4)
    resident = ran(recipe, tmp_path / "resident", plan__weights="resident")
    ends = {"plan__embedding_placement": "host", "plan__head_placement": "host"}
    streamed = ran(recipe, tmp_path / "streamed", plan__weights="streamed", **ends)
    for figure in ("loss", "grad_norm", "eval_loss"):
        assert column(streamed, figure) == pytest.approx(column(resident, figure), rel=1e-5)
    one, two = last_state(resident)["trainable"], last_state(streamed)["trainable"]
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(two[name], tensor, rtol=1e-3, atol=2e-5 if optimizer == "adamw" else 1e-3, msg=name)


@pytest.mark.parametrize(
    "ends",
    [
        {},
        {"plan__embedding_placement": "host", "plan__head_placement": "host"},
        {"plan__embedding_placement": "host", "plan__head_placement": "visit"},
    ],
)
def test_an_interrupted_streamed_run_ends_with_the_same_bits(
    tiny: dict[str, Any], tmp_path: Path, ends: dict[str, Any]
) -> None:
    """SIGTERM between two steps: promised updates are made before the state is saved."""
    from tests.runs.test_resume import interrupted

    recipe = changed(method(tiny, "none"), plan__weights="streamed", plan__fast_block=True, plan__micro_batch=2)
    recipe = changed(recipe, optimizer__name="adamw8bit", evaluate__every=2, checkpoint__every=3, **ends)
    straight = ran(recipe, tmp_path / "straight")
    interrupted(recipe, tmp_path / "stopped", 3)
    assert same_bits(straight, tmp_path / "stopped")
