"""Bytes of every method beside counted ones: what is trained, what is held, what autograd keeps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from finetune.config.schema import Recipe
from finetune.contracts import Shape
from finetune.memory import activations, checkpointing
from finetune.memory.storage import Storage, Work, storage_of, trained_tensors, weight_bytes
from finetune.models.adapter_folder import as_planned
from finetune.models.load import load_model
from finetune.models.shapes import shape_for
from tests.unit.planner.live_bytes import saved_bytes

PATH = "builtin:tiny-random"
METHODS: dict[str, dict[str, Any]] = {
    "dora": {"adapter": {"kind": "dora", "rank": 4}},
    "pissa": {"adapter": {"kind": "lora", "rank": 4, "init": "pissa"}},
    "whole head": {"adapter": {"kind": "lora", "rank": 4, "modules_to_save": ["lm_head"]}},
    "whole vocabulary": {"adapter": {"kind": "lora", "rank": 4, "modules_to_save": ["lm_head", "embed_tokens"]}},
    "whole norms": {"adapter": {"kind": "lora", "rank": 4, "modules_to_save": ["norm"]}},
    "new tokens": {"adapter": {"kind": "lora", "rank": 4}, "model": {"new_tokens": ["<a>", "<b>"]}},
    "dora, int8": {"adapter": {"kind": "dora", "rank": 4}, "model": {"base": "int8"}},
    "dora, fp8": {"adapter": {"kind": "dora", "rank": 4}, "model": {"base": "fp8"}},
}


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


def recipe_of(sections: dict[str, Any]) -> Recipe:
    return Recipe.model_validate({**sections, "model": {"path": PATH, **sections.get("model", {})}})


def facts(name: str, precision: str) -> tuple[Recipe, Shape, Storage, Any]:
    recipe = recipe_of(METHODS[name])
    shape = shape_for(recipe)
    model = load_model(recipe, "cpu", precision, shape=shape)
    return recipe, shape, storage_of(shape, recipe, precision), model


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", METHODS)
def test_trained_and_held_bytes_are_those_of_the_model(name: str, precision: str) -> None:
    _, shape, storage, model = facts(name, precision)
    trained = sum(elements for elements, _ in trained_tensors(shape, storage))
    real = sum(p.numel() for p in model.trainable().values())
    # A plan does not know norms by name: one name counts for all of them.
    slack = shape.blocks * shape.block_extra if name == "whole norms" else 0
    assert real <= trained <= real + slack
    tensors = [
        *model.module.parameters(),
        *(b for n, b in model.module.named_buffers() if n.endswith(("codes", "scale"))),
    ]
    held = sum(t.numel() * t.element_size() for t in tensors)
    assert held <= weight_bytes(shape, storage) <= held + 4 * slack


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ["dora", "dora, int8"])
def test_what_dora_keeps_is_never_counted_too_low(name: str, precision: str) -> None:
    _, shape, storage, model = facts(name, precision)
    ids = torch.randint(0, 256, (8, 96))
    model.module.train()
    with saved_bytes(model.module) as seen, torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
        model.backbone(input_ids=ids, use_cache=False)
    work = Work(8, 96)
    planned = checkpointing.kept_bytes(shape, storage, work, False) + activations.saved_outside(shape, storage, work)
    counted = sum(seen.values())
    assert counted * 0.97 <= planned <= counted * 1.1


def test_new_tokens_of_a_file_are_counted(tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text("<a>\n<b>\n<c>\n")
    given = {"new_tokens": ["<d>"], "new_tokens_path": str(tmp_path / "tokens")}
    recipe = as_planned(recipe_of({"adapter": {"kind": "lora"}, "model": given}))
    shape = shape_for(recipe)
    rows = [elements for elements, role in trained_tensors(shape, storage_of(shape, recipe, "fp32")) if role != "block"]
    assert rows == [4 * shape.hidden, 4 * shape.hidden]


def test_the_widest_rank_by_name_is_counted() -> None:
    ranks = {"kind": "lora", "rank": 4, "ranks": {"q_proj": 9, "v_proj": 2}}
    recipe = recipe_of({"adapter": ranks})
    assert storage_of(shape_for(recipe), recipe, "fp32").rank == 9


@pytest.mark.parametrize(
    ("adapter", "fast"),
    [
        ({"kind": "lora", "scaling": "rslora"}, True),
        ({"kind": "lora", "modules_to_save": ["lm_head", "embed_tokens"]}, True),
        ({"kind": "dora"}, False),
        ({"kind": "lora", "init": "pissa"}, False),
        ({"kind": "lora", "modules_to_save": ["input_layernorm"]}, False),
    ],
)
def test_a_gpus_plan_has_fast_blocks_only_where_they_hold_the_method(adapter: dict[str, Any], fast: bool) -> None:
    recipe = recipe_of({"adapter": adapter})
    assert storage_of(shape_for(recipe), recipe, "bf16", "cuda").fast == fast
