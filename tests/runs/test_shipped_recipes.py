"""Every shipped recipe really trains: its own data and template, with the tiny model in place of the large one."""

from __future__ import annotations

from pathlib import Path

import pytest

import finetune
from finetune.config.load import load_recipe, recipe_names
from tests.runs.history import column

ROOT = Path(__file__).resolve().parents[2]
NAMES = recipe_names()


def test_all_recipes_are_walked() -> None:
    assert len(NAMES) == len(list((ROOT / "recipes").glob("*.yaml"))) == 7


@pytest.mark.parametrize("name", NAMES)
def test_recipe_trains(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    recipe = load_recipe(name)
    batch = "train.batch=2" if recipe.train.batch else "train.batch_tokens=2048"
    run = finetune.run(
        name,
        *("model.path=builtin:tiny", "device=cpu", f"run.dir={tmp_path / 'run'}", "data.max_tokens=1024", batch),
        *("data.max_rows=40", "evaluate.max_rows=3", "evaluate.samples=0", "train.max_steps=3", "train.epochs=null"),
        *("evaluate.every=null", "checkpoint.every=null", "optimizer.lr=1e-2", "schedule.warmup=0"),
    )
    losses = column(tmp_path / "run", "loss")
    assert len(losses) == 3
    assert run.summary["eval_after"]["eval_loss"] < run.summary["eval_before"]["eval_loss"]
    assert run.result is not None
    assert run.result.name == ("model" if recipe.adapter.kind == "none" else "adapter")
    again = load_recipe(tmp_path / "run" / "recipe.yaml")
    assert again.model.path == "builtin:tiny"
    assert again.optimizer.name == recipe.optimizer.name
