"""Reading what a run left: its lines and its last state."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from finetune.checkpoint import store


def lines(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def column(folder: Path, name: str) -> list[float]:
    return [line[name] for line in lines(folder) if name in line]


def last_state(folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    path, _ = store.newest(folder / "checkpoints")
    return store.read(path)[0]


def same_bits(first: Path, second: Path) -> bool:
    """Whether two runs ended with the same weights and optimizer state, bit for bit."""
    one, two = last_state(first), last_state(second)
    return all(
        one[group].keys() == two[group].keys() and all(torch.equal(one[group][k], two[group][k]) for k in one[group])
        for group in ("trainable", "optimizer")
    )
