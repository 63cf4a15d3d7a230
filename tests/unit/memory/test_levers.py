"""Every lever on and off, alone and together, gives the same losses and gradients; every row is covered."""

from __future__ import annotations

import itertools

import pytest
import torch

from finetune.config.schema import PlanSection, Recipe
from finetune.contracts import Plan
from finetune.memory.storage import Work, storage_of
from finetune.memory.table import LEVERS
from finetune.models.shapes import SHAPES
from tests.unit.memory.tiny_models import base_of, rows, step, tiny, with_lora

MODELS = {
    "full": tiny,
    "full tied": lambda: tiny(tied=True),
    "lora": lambda: with_lora(tiny()),
    "lora on the head": lambda: with_lora(tiny(), target_modules=["q_proj", "lm_head"]),
    "trained copy of the head": lambda: with_lora(tiny(), target_modules=["v_proj"], modules_to_save=["lm_head"]),
}
CHUNKS = (0, 5, 1024)


@pytest.mark.parametrize("kind", MODELS)
def test_levers_alone_and_together_change_nothing_at_any_micro_batch(kind: str) -> None:
    model = MODELS[kind]()
    expected_loss, expected = step(model, micro_batch=4, checkpoint=False, chunk=0)
    assert expected
    for micro_batch, checkpoint, chunk in itertools.product((1, 2, 4), (False, True), CHUNKS):
        loss, found = step(model, micro_batch, checkpoint, chunk)
        assert loss == pytest.approx(expected_loss, abs=1e-6, rel=1e-6)
        assert found.keys() == expected.keys()
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name], gradient, atol=1e-6, rtol=1e-5, msg=name)


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_loss_equals_that_of_transformers(kind: str) -> None:
    model = MODELS[kind]().train()
    ids, labels = rows()
    expected = model(input_ids=ids, labels=labels, use_cache=False).loss.item()
    assert step(model, 4, False, 0)[0] == pytest.approx(expected, abs=1e-6)
    assert step(model, 4, True, 7)[0] == pytest.approx(expected, abs=1e-6)


def test_checkpointing_is_bitwise_in_fp32() -> None:
    model = MODELS["lora"]()
    loss, plain = step(model, 2, False, 0)
    again, recomputed = step(model, 2, True, 0)
    assert loss == again
    assert all(torch.equal(plain[name], recomputed[name]) for name in plain)
    assert LEVERS["activation checkpointing"].exact == "bitwise"


def test_table_rows_are_plan_fields_with_sound_costs() -> None:
    assert list(LEVERS) == ["activation checkpointing", "chunked loss"]
    shape, work = SHAPES["llama3-8b"], Work(4, 2048)
    recipe = Recipe.model_validate({"model": {"path": "x"}, "adapter": {"kind": "lora"}})
    storage = storage_of(shape, recipe, "bf16", "cuda")
    for name, lever in LEVERS.items():
        assert lever.name == name
        assert lever.field in PlanSection.model_fields
        assert lever.field in Plan.__dataclass_fields__
        assert lever.note
        assert lever.saves(shape, storage, work, lever.off) == 0
        assert lever.slowdown(shape, storage, work, lever.off) == 0
        for value in lever.choices[1:]:
            assert lever.saves(shape, storage, work, value) > 2**30
            assert 0 < lever.slowdown(shape, storage, work, value) < 1
    # One more forward of frozen linears beside their forward and one backward: nearly half of the step.
    assert LEVERS["activation checkpointing"].slowdown(shape, storage, work, True) == pytest.approx(0.46, abs=0.03)
    # 8,192 positions x 128,256 words x 12 bytes, against 1,024 x 128,256 x 2.
    saved = LEVERS["chunked loss"].saves(shape, storage, work, 1024)
    assert saved == 8192 * 128256 * 12 - 1024 * 128256 * 2 - 2 * 8192 * 4096 * 2


def test_base_of_finds_the_model_inside() -> None:
    assert base_of(MODELS["lora"]()).config.model_type == "llama"
