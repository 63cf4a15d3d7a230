"""Activation checkpointing: works with frozen embeddings, in both adapter orders, on and off, without warnings."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from finetune.errors import ModelError
from finetune.memory import checkpointing
from tests.unit.memory.tiny_models import base_of, rows, tiny, with_lora


def lora_gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    model.train()
    ids, labels = rows()
    model(input_ids=ids, labels=labels, use_cache=False).loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("order", ["adapter first", "checkpointing first"])
def test_b132_lora_gradients_with_frozen_embeddings_equal_those_without(order: str) -> None:
    expected = lora_gradients(with_lora(tiny()))
    assert len(expected) == 28
    assert all(gradient.abs().max() > 0 for gradient in expected.values())
    model: nn.Module = tiny() if order == "checkpointing first" else with_lora(tiny())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        checkpointing.apply(model)
    if order == "checkpointing first":
        model = with_lora(model)
    found = lora_gradients(model)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("adapted", [False, True])
def test_it_saves_what_blocks_keep_and_can_be_turned_off(adapted: bool) -> None:
    model: nn.Module = with_lora(tiny()) if adapted else tiny()

    def saved() -> int:
        seen: dict[int, int] = {}
        ids, _ = rows()

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            seen[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            base_of(model.train()).model(input_ids=ids, use_cache=False)
        return sum(seen.values())

    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        before = saved()
        checkpointing.apply(model)
        during = saved()
        checkpointing.apply(model, False)
        after = saved()
    assert during < before / 2
    assert after == before


def test_the_hook_on_embeddings_is_not_left_behind() -> None:
    model = with_lora(tiny())
    checkpointing.apply(model)
    embedded = base_of(model).get_input_embeddings()(torch.tensor([[1, 2]]))
    assert not embedded.requires_grad


def test_a_model_without_it_is_refused_by_name() -> None:
    with pytest.raises(ModelError, match="Linear is no transformers model"):
        checkpointing.apply(nn.Linear(2, 2))
    model = tiny()
    model.supports_gradient_checkpointing = False
    with pytest.raises(ModelError, match="LlamaForCausalLM does not support"):
        checkpointing.apply(model)
