"""Checkpointing by blocks and by operations: what is kept and run again is what the mode says."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from finetune.errors import ModelError
from finetune.memory import checkpointing
from tests.unit.memory.tiny_models import base_of, rows, tiny, with_lora


class Attentions(TorchDispatchMode):
    """Counts how often attention is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += function in checkpointing._attention_operations()
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("mode", "runs"), [(False, 5), (True, 10), (2, 5 + 3), (3, 5 + 4), (7, 10), ("selective", 5)], ids=str
)
def test_each_mode_runs_as_many_attentions_again_as_it_says(mode: Any, runs: int) -> None:
    model = tiny(blocks=5).train()
    checkpointing.apply(model, mode)
    ids, labels = rows()
    with Attentions() as seen:
        model(input_ids=ids, labels=labels, use_cache=False).loss.backward()
    assert seen.count == runs
    assert checkpointing.kept_blocks(5, mode) == (5 if mode is False else 5 - (runs - 5) if mode != "selective" else 0)


@pytest.mark.parametrize("mode", [True, 2, "selective"], ids=str)
def test_b132_every_mode_reaches_adapters_over_frozen_embeddings(mode: Any) -> None:
    model = with_lora(tiny())
    ids, labels = rows()

    def gradients(which: Any) -> dict[str, torch.Tensor]:
        copied = copy.deepcopy(model).train()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            checkpointing.apply(copied, which)
            base_of(copied)(input_ids=ids, labels=labels, use_cache=False).loss.backward()
        return {name: p.grad for name, p in copied.named_parameters() if p.grad is not None}

    plain, found = gradients(False), gradients(mode)
    assert found.keys() == plain.keys()
    assert len(plain) == 28
    assert all(torch.equal(found[name], plain[name]) for name in plain)


def test_evaluation_and_inference_are_left_alone() -> None:
    model = tiny()
    checkpointing.apply(model, "selective")
    ids, _ = rows()
    expected = tiny().eval()(input_ids=ids).logits
    assert torch.equal(model.eval()(input_ids=ids).logits, expected)
    with torch.no_grad():
        assert torch.equal(model.train()(input_ids=ids).logits, expected)


def test_an_architecture_that_checkpoints_all_blocks_or_none_is_told() -> None:
    model = tiny()
    model.model.layers = torch.nn.ModuleList()
    with pytest.raises(ModelError, match="lets all blocks checkpoint or none"):
        checkpointing.apply(model, 2)
