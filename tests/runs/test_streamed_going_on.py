"""A checkpoint does not say where the weights were: a run goes on with the other placement, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import finetune
from tests.house.source import ROOT


def losses(folder: Path, kind: str, weights: str, steps: int, **more: Any) -> list[float]:
    recipe = {
        "recipe": "going-on",
        "model": {"path": "builtin:tiny"},
        "adapter": {"kind": kind},
        "data": {
            "path": str(ROOT / "examples/grammar-synth/train.jsonl"), "template": "grammar", "max_tokens": 256, "max_rows": 24,
        },
        "optimizer": {"name": "adamw", "lr": 1e-3},
        "train": {"batch": 2, "max_steps": steps},
        "schedule": {"name": "constant"},
        "evaluate": {"samples": 0},
        "plan": {"weights": weights, "activation_checkpointing": True, "micro_batch": 1},
        "run": {"dir": str(folder)},
        **more,
    }  # fmt: skip
    run = finetune.run(recipe)
    lines = [json.loads(line) for line in (run.dir / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


@pytest.mark.parametrize("kind", ["lora", "none"])
def test_a_run_goes_on_with_its_weights_elsewhere(tmp_path: Path, kind: str) -> None:
    whole = losses(tmp_path / "whole", kind, "resident", 4)
    for first, then in (("resident", "streamed"), ("streamed", "resident"), ("streamed", "streamed")):
        folder = tmp_path / f"{first}-{then}"
        assert losses(folder, kind, first, 2) == whole[:2]
        assert losses(folder, kind, then, 4, resume="auto") == whole
