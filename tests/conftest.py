"""Fixtures that every floor of the tests may use: small rows on disk and a recipe for the tiny model."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import pytest

WORDS = [
    "the",
    "a",
    "cat",
    "dog",
    "tree",
    "runs",
    "sleeps",
    "eats",
    "blue",
    "green",
    "small",
    "large",
    "very",
    "not",
    "and",
    "or",
    "of",
    "in",
    "on",
    "under",
]


def alpaca_rows(count: int, seed: int = 0) -> list[dict[str, str]]:
    """Rows of uneven length in Alpaca columns."""
    draw = random.Random(seed)

    def text(low: int, high: int) -> str:
        return " ".join(draw.choice(WORDS) for _ in range(draw.randint(low, high)))

    return [{"instruction": text(1, 8), "input": text(0, 3), "output": text(1, 10)} for _ in range(count)]


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture(autouse=True)
def own_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test runs in a folder of its own, so that nothing it writes lands in the checkout."""
    monkeypatch.chdir(tmp_path)
    places = [str(Path(__file__).resolve().parent.parent), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, places)))


@pytest.fixture
def tiny(tmp_path: Path) -> dict[str, Any]:
    """A recipe that trains the tiny model on 24 rows in about a second."""
    write_jsonl(tmp_path / "train.jsonl", alpaca_rows(24))
    write_jsonl(tmp_path / "valid.jsonl", alpaca_rows(7, seed=1))
    return {
        "recipe": "tiny",
        "device": "cpu",
        "model": {"path": "builtin:tiny"},
        "adapter": {"kind": "lora", "rank": 4, "alpha": 8},
        "data": {
            "path": str(tmp_path / "train.jsonl"),
            "valid_path": str(tmp_path / "valid.jsonl"),
            "template": "alpaca",
            "max_tokens": 512,
        },
        "optimizer": {"lr": 1e-2},
        "train": {"batch": 4, "max_steps": 8},
        "evaluate": {"samples": 0},
        "run": {"dir": str(tmp_path / "run")},
    }


def method(recipe: dict[str, Any], kind: str) -> dict[str, Any]:
    """A copy that trains with LoRA, or (none) every parameter, at a rate that suits both."""
    copy = changed(recipe, optimizer__lr=1e-3)
    return copy if kind == "lora" else changed(copy, adapter={"kind": "none"})


def changed(recipe: dict[str, Any], **dotted: Any) -> dict[str, Any]:
    """A copy of a recipe with `section__key=value` changes."""
    copy = json.loads(json.dumps(recipe))
    for key, value in dotted.items():
        *sections, last = key.split("__")
        place = copy
        for section in sections:
            place = place.setdefault(section, {})
        place[last] = value
    return copy
