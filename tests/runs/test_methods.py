"""Whole runs of every method: trained, stopped and resumed to the same bits, exported and answered with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import finetune
from finetune.config.load import load_recipe
from finetune.errors import CheckpointError, ModelError
from finetune.train import after
from tests.conftest import changed
from tests.runs.history import column, same_bits
from tests.runs.test_resume import interrupted

NEW = ["<tree>", "blue green"]
METHODS: dict[str, dict[str, Any]] = {
    "dora": {"adapter__kind": "dora"},
    "rslora, ranks": {"adapter__scaling": "rslora", "adapter__ranks": {"q_proj": 2}},
    "pissa": {"adapter__init": "pissa"},
    "olora": {"adapter__init": "olora", "adapter__alpha": 4},
    "whole head": {"adapter__modules_to_save": ["lm_head"], "optimizer__lr": 1e-3},
    "new tokens": {"model__new_tokens": NEW},
    "new tokens, pissa": {"model__new_tokens": NEW, "adapter__init": "pissa"},
    "new tokens, full": {"model__new_tokens": NEW, "adapter": {"kind": "none"}, "optimizer__lr": 1e-3},
    "nf4 alone": {"model__base": "nf4", "model__double_quant": False},
    "int8": {"model__base": "int8"},
    "fp8, dropout": {"model__base": "fp8", "adapter__dropout": 0.1},
    "last block": {"adapter": {"kind": "none"}, "train__last_blocks": 1, "optimizer__lr": 1e-3},
    "frozen embedding": {"adapter": {"kind": "none"}, "train__freeze": ["embed_tokens"], "optimizer__lr": 1e-3},
    "random": {"model__path": "builtin:tiny-random", "model__layers": 1},
}


@pytest.mark.parametrize("name", METHODS)
def test_b82_every_method_goes_on_to_the_same_bits_and_exports(tiny: dict[str, Any], tmp_path: Path, name: str) -> None:
    recipe = changed(tiny, train__max_steps=4, generate__max_tokens=4, **METHODS[name])
    run = finetune.run(changed(recipe, run__dir=str(tmp_path / "straight")))
    losses = column(tmp_path / "straight", "loss")
    assert losses[-1] < losses[0]
    interrupted(recipe, tmp_path / "stopped", 2)
    assert same_bits(tmp_path / "straight", tmp_path / "stopped")
    kinds = ("merged",) if recipe["adapter"]["kind"] == "none" else ("adapter", "merged")
    for to in kinds:
        done = after.export(run.dir, to, tmp_path / to, None)
        assert done["largest_logit_difference"] < 1e-3
    assert len(after.generate(run.dir, ["a tree"])) == 1
    # The run's own figure, from its result read again.
    figures = after.evaluate(run.dir)
    assert figures["eval_loss"] == pytest.approx(run.summary["eval_after"]["eval_loss"], abs=1e-4)


@pytest.mark.parametrize("name", ["dora", "whole head", "new tokens", "int8", "fp8, dropout", "last block", "pissa"])
def test_every_method_trains_in_bf16(tiny: dict[str, Any], tmp_path: Path, name: str) -> None:
    recipe = changed(tiny, train__max_steps=3, model__precision="bf16", **METHODS[name])
    finetune.run(recipe)
    losses = column(tmp_path / "run", "loss")
    assert losses[-1] < losses[0]


def test_a_run_stands_on_the_new_tokens_that_it_read(tiny: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "tokens.txt"
    file.write_text("<tree>\n${a}\n012\nnull\n")
    recipe = changed(tiny, train__max_steps=2, generate__max_tokens=2, model__new_tokens=["<b>"])
    recipe["model"]["new_tokens_path"] = str(file)
    run = finetune.run(recipe)
    kept = load_recipe(run.dir / "recipe.yaml").model
    assert (kept.new_tokens, kept.new_tokens_path) == (("<b>", "<tree>", "${a}", "012", "null"), None)
    figures = after.evaluate(run.dir)
    file.unlink()
    assert after.evaluate(run.dir) == figures
    assert len(after.generate(run.dir, ["a tree"])) == 1
    assert after.export(run.dir, "adapter", tmp_path / "out", None)["largest_logit_difference"] < 1e-3
    assert finetune.run(run.dir, f"run.dir={run.dir}", "resume=auto", "train.max_steps=3").summary["steps"] == 3
    file.write_text("${a}\n<tree>\n")
    with pytest.raises(CheckpointError, match=r"model\.new_tokens: (.|\n)* in the checkpoint"):
        finetune.run(changed(recipe, resume="auto", run__dir=str(run.dir), train__max_steps=4))
    file.write_text("???\n")
    with pytest.raises(ModelError, match=r"\?\?\?(.|\n)*cannot be written in a recipe"):
        finetune.run(changed(recipe, run__dir=str(tmp_path / "other")))
