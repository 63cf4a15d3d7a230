"""What needs a CUDA device: the same runs as on the CPU, in bf16, with a 4-bit base and with the GPU's kernels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import finetune
from tests.conftest import changed, method
from tests.runs.history import column, same_bits
from tests.runs.test_resume import interrupted

pytestmark = pytest.mark.gpu


@pytest.fixture
def on_gpu(tiny: dict[str, Any]) -> dict[str, Any]:
    return changed(tiny, device="cuda", optimizer__lr=1e-3)


@pytest.mark.parametrize("kind", ["none", "lora"])
def test_fp32_losses_equal_the_cpu(tiny: dict[str, Any], tmp_path: Path, kind: str) -> None:
    recipe = changed(method(tiny, kind), model__precision="fp32", optimizer__lr=1e-3)
    for device in ("cpu", "cuda"):
        finetune.run(changed(recipe, device=device, run__dir=str(tmp_path / device)))
    assert column(tmp_path / "cuda", "loss") == pytest.approx(column(tmp_path / "cpu", "loss"), abs=1e-3)


@pytest.mark.parametrize(
    ("kind", "base", "optimizer"),
    [("none", "same", "adamw"), ("none", "same", "adamw8bit"), ("lora", "same", "adamw"), ("lora", "nf4", "adamw8bit")],
)
def test_bf16_resumes_to_the_same_bits(
    on_gpu: dict[str, Any], tmp_path: Path, kind: str, base: str, optimizer: str
) -> None:
    recipe = changed(method(on_gpu, kind), model__base=base, optimizer__name=optimizer, data__pack=True)
    finetune.run(changed(recipe, run__dir=str(tmp_path / "straight")))
    losses = column(tmp_path / "straight", "loss")
    assert losses[-1] < losses[0]
    interrupted(recipe, tmp_path / "stopped", 3)
    assert same_bits(tmp_path / "straight", tmp_path / "stopped")


def test_bf16_is_near_fp32(on_gpu: dict[str, Any], tmp_path: Path) -> None:
    for precision in ("fp32", "bf16"):
        finetune.run(changed(on_gpu, model__precision=precision, run__dir=str(tmp_path / precision)))
    assert column(tmp_path / "bf16", "loss") == pytest.approx(column(tmp_path / "fp32", "loss"), abs=3e-2)


def test_levers_do_not_change_the_losses(on_gpu: dict[str, Any], tmp_path: Path) -> None:
    recipe = changed(on_gpu, model__precision="fp32", adapter__dropout=0.1)
    plain = {"plan__activation_checkpointing": False, "plan__loss_chunk": 0, "plan__micro_batch": 4}
    finetune.run(changed(recipe, **plain, run__dir=str(tmp_path / "plain")))
    levers = {"plan__activation_checkpointing": True, "plan__loss_chunk": 64, "plan__micro_batch": 1}
    finetune.run(changed(recipe, **levers, run__dir=str(tmp_path / "levers")))
    assert column(tmp_path / "levers", "loss") == pytest.approx(column(tmp_path / "plain", "loss"), abs=1e-4)


def test_measured_peak_is_within_the_plan(on_gpu: dict[str, Any]) -> None:
    summary = finetune.run(on_gpu).summary
    # Beside the run's tensors torch's allocator counted 68 MiB, which is taken to be cuBLAS's workspaces.
    assert 0 < summary["peak_gpu_bytes_measured"] <= 1.1 * summary["peak_gpu_bytes_planned"] + 72 * 2**20
    assert torch.cuda.max_memory_allocated() > 0
