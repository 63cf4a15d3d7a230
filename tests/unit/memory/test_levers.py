"""Every lever on and off, alone and together, gives the same losses and gradients; every row is covered."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

from finetune.config.schema import PlanSection, Recipe
from finetune.contracts import Plan
from finetune.memory import checkpointing
from finetune.memory.case import Case, case_of
from finetune.memory.storage import storage_of
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
    shape = SHAPES["llama3-8b"]
    recipe = Recipe.model_validate({"model": {"path": "x"}, "adapter": {"kind": "lora"}})
    storage = storage_of(shape, recipe, "bf16", "cuda")
    off = Plan("cuda", 4, False, 0)
    base = case_of(shape, storage, off, 2048, 4, lambda elements, role: 8 * elements + 4)

    def case(field: str, value: Any) -> Case:
        return replace(base, plan=replace(off, **{field: value}))

    for name, lever in LEVERS.items():
        assert lever.name == name
        assert lever.field in PlanSection.model_fields
        assert lever.field in Plan.__dataclass_fields__
        assert lever.note
        assert lever.saves(case(lever.field, lever.off)) == 0
        assert lever.slowdown(case(lever.field, lever.off)) == 0
        costs = [lever.slowdown(case(lever.field, value)) for value in lever.choices]
        assert costs == sorted(costs)
        for value in lever.choices[1:]:
            assert lever.saves(case(lever.field, value)) > 100 * 2**20
            # Without checkpointing, offload moves more than the link can hide.
            assert 0 < lever.slowdown(case(lever.field, value)) < (8 if lever.field == "activation_offload" else 1)
    # One more forward of frozen linears, but for the down projection, beside their forward and one backward.
    assert checkpointing.slowdown(case("activation_checkpointing", True)) == pytest.approx(0.33, abs=0.02)
    slow = replace(base, storage=replace(base.storage, fast=False), plan=replace(off, activation_checkpointing=True))
    assert checkpointing.slowdown(slow) == pytest.approx(0.40, abs=0.03)
    # 8,192 positions x 128,256 words x 12 bytes, against 1,024 x 128,256 x 2.
    saved = LEVERS["chunked loss"].saves(case("loss_chunk", 1024))
    assert saved == 8192 * 128256 * 12 - 1024 * 128256 * 2 - 2 * 8192 * 4096 * 2
    # 32 boundaries of 8,192 x 4,096 x 2 bytes, of which three stay: their own and two on their way.
    both = replace(base, plan=replace(off, activation_checkpointing=True, activation_offload=True))
    assert LEVERS["activation offload"].saves(both) == 29 * 8192 * 4096 * 2
    assert LEVERS["embedding on the host"].saves(case("embedding_placement", "host")) == 128256 * 4096 * 2
    # 41,943,040 adapter parameters: 16 MB tensors at most, so nearly all gradients; and two fp32 moments each.
    assert LEVERS["optimizer on the host"].saves(case("optimizer_placement", "host")) == 8 * 41_943_040 + 4 * 448
    saved = LEVERS["step in backward"].saves(case("optimizer_in_backward", True))
    assert saved == 4 * 41_943_040 - 4 * 16 * 14336


def test_base_of_finds_the_model_inside() -> None:
    assert base_of(MODELS["lora"]()).config.model_type == "llama"
