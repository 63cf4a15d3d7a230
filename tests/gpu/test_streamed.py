"""Streamed weights on a GPU at the widths of an 8B layer: the bits of resident weights, and pages that come and go."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import finetune
from finetune.memory.host import host_pages
from tests.runs.history import column, same_bits

pytestmark = pytest.mark.gpu

CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "lora": ({"adapter": {"kind": "lora", "rank": 16, "dropout": 0.1}}, {"micro_batch": 2}),
    "lora packed": (
        {"adapter": {"kind": "lora", "rank": 16, "dropout": 0.1}, "pack": True},
        {"micro_batch": 1, "activation_offload": True},
    ),
    "nf4": ({"adapter": {"kind": "lora", "rank": 16}, "base": "nf4"}, {"micro_batch": 1, "slots": 2}),
    "full": ({"adapter": {"kind": "none"}}, {"micro_batch": 2, "activation_offload": True}),
    "full micro 1": ({"adapter": {"kind": "none"}}, {"micro_batch": 1, "resident_blocks": 1}),
}


def recipe_of(folder: Path, what: dict[str, Any], plan: dict[str, Any], steps: int = 3) -> dict[str, Any]:
    full = what["adapter"]["kind"] == "none"
    rows = folder / "rows.jsonl"
    if not rows.exists():
        texts = [chr(97 + index % 26) * 300 + " the end" * (20 + index % 40) for index in range(32)]
        rows.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return {
        "recipe": "streamed-on-gpu",
        "model": {
            "path": "builtin:llama3-8b-random", "layers": 2, "base": what.get("base", "same"), "precision": "bf16",
            **({"trained": "stochastic"} if full else {}),
        },
        "adapter": what["adapter"],
        "data": {"path": str(rows), "template": "text", "max_tokens": 512, "pack": what.get("pack", False)},
        "optimizer": {"name": "adamw8bit" if full else "adamw", "lr": 1e-4},
        "schedule": {"name": "constant"},
        "train": {"batch": 4, "max_steps": steps},
        "evaluate": {"samples": 0},
        "plan": {
            "activation_checkpointing": True, "fast_block": True, "attention": "deterministic", "loss_chunk": 256,
            "embedding_placement": "device", **plan,
        },
        "run": {"dir": str(folder / plan["weights"])},
    }  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_streamed_runs_give_the_bits_of_resident_ones(tmp_path: Path, name: str) -> None:
    what, own = CASES[name]
    shared = {"micro_batch": own["micro_batch"]}
    resident = finetune.run(recipe_of(tmp_path, what, {"weights": "resident", "activation_offload": False, **shared}))
    streamed = finetune.run(recipe_of(tmp_path, what, {"weights": "streamed", "activation_offload": False, **own}))
    for figure in ("loss", "grad_norm"):
        assert column(resident.dir, figure) == column(streamed.dir, figure)
    assert same_bits(resident.dir, streamed.dir)


@pytest.mark.parametrize("kind", ["none", "lora"])
def test_embedding_and_head_in_parts_train_alike(tmp_path: Path, kind: str) -> None:
    """Sums in another order: bf16 products round each logit by 2^-9, so losses near 12 agree to some 1e-3."""
    what = {"adapter": {"kind": kind}}
    resident = finetune.run(recipe_of(tmp_path, what, {"weights": "resident", "micro_batch": 2}))
    ends = {"embedding_placement": "host", "head_placement": "host", "activation_offload": True}
    streamed = finetune.run(recipe_of(tmp_path, what, {"weights": "streamed", "micro_batch": 2, **ends}))
    assert column(streamed.dir, "loss") == pytest.approx(column(resident.dir, "loss"), rel=1e-3)
    assert column(streamed.dir, "grad_norm") == pytest.approx(column(resident.dir, "grad_norm"), rel=2e-2)
    peaks = [run.summary["peak_gpu_bytes_measured"] for run in (resident, streamed)]
    assert peaks[1] < peaks[0]
    assert streamed.summary["peak_gpu_bytes_measured"] <= 1.05 * streamed.summary["peak_gpu_bytes_planned"]


def test_pages_can_be_pinned_given_back_and_pinned_again() -> None:
    device = torch.device("cuda", 0)
    for _ in range(3):
        pages = host_pages(2**20, device)
        assert pages.is_pinned()
        there = pages.to(device, non_blocking=True)
        torch.cuda.synchronize()
        assert there.numel() == 2**20
        del pages
        # A page that went back without leaving the driver's table would fail the next launch.
        torch.ones(8, device=device).sum().item()
