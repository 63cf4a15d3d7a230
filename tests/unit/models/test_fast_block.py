"""The fast block against transformers' own layers: outputs and every gradient, for each family it knows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from finetune.contracts import Batch, Model
from finetune.errors import ModelError
from finetune.kernels.keyed_dropout import DrawKey, key_dropouts
from finetune.models import decoder
from finetune.models.fast import backbone
from finetune.models.fast.block import FastBlock
from finetune.models.shapes import shape_of

SIZES = {
    "vocab_size": 101, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
FAMILIES: dict[str, tuple[type, type, dict[str, Any]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM, {"attention_bias": False}),
    "llama-bias": (LlamaConfig, LlamaForCausalLM, {"attention_bias": True, "tie_word_embeddings": True}),
    "mistral-window": (MistralConfig, MistralForCausalLM, {"sliding_window": 5, "head_dim": 16}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {}),
    "qwen2-window": (
        Qwen2Config, Qwen2ForCausalLM, {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    ),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 16}),
}  # fmt: skip
METHODS = ("full", "lora", "lora-dropout")


def build(family: str, method: str, dtype: torch.dtype = torch.float32) -> tuple[Model, DrawKey]:
    config_class, model_class, more = FAMILIES[family]
    torch.manual_seed(3)
    base: nn.Module = model_class(config_class(**{**SIZES, **more}, attn_implementation="sdpa")).to(dtype)
    for name, parameter in base.named_parameters():
        if "norm" in name or name.endswith("bias"):
            parameter.data = torch.randn(parameter.shape).to(dtype) * 0.3 + 1
    module = base
    if method != "full":
        targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
        dropout = 0.25 if method == "lora-dropout" else 0.0
        module = get_peft_model(base, LoraConfig(r=4, lora_alpha=12, lora_dropout=dropout, target_modules=targets))
        for name, parameter in module.named_parameters():
            if "lora_B" in name:
                parameter.data = torch.randn(parameter.shape) * 0.1
    key = DrawKey(7)
    key_dropouts(module, key)
    model = decoder.assemble(module, None, shape_of(base.config), "test")
    module.train()
    return model, key


def batch_of(packed: bool) -> Batch:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 101, (3, 12), generator=generator)
    documents = torch.tensor([[0] * 5 + [1] * 7, [0] * 12, [0] * 2 + [1] * 3 + [2] * 7]) if packed else None
    positions = torch.tensor([[*range(5), *range(7)], [*range(12)], [*range(2), *range(3), *range(7)]])
    return Batch(ids, ids.clone(), torch.tensor([11, 5, 8]), documents, positions if packed else None, (12, 12, 12))


def outcome(model: Model, key: DrawKey, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """Hidden states, and the gradients of a fixed function of them."""
    key.set(4, batch.row_ids)
    model.module.zero_grad()
    hidden = decoder.hidden_states(model, batch)
    weights = torch.linspace(-1, 1, hidden.numel()).view(hidden.shape)
    (hidden.float() * weights).sum().backward()
    grads = {name: p.grad.clone() for name, p in model.module.named_parameters() if p.grad is not None}
    return hidden.detach(), grads


@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", FAMILIES)
def test_outputs_and_gradients_equal_transformers(family: str, method: str, recompute: bool, packed: bool) -> None:
    model, key = build(family, method)
    batch = batch_of(packed)
    hidden, grads = outcome(model, key, batch)
    model.fast = backbone.install(model, "auto", torch.float32)
    for block in model.blocks:
        assert isinstance(block, FastBlock)
        block.recompute = recompute
    fast_hidden, fast_grads = outcome(model, key, batch)
    torch.testing.assert_close(fast_hidden, hidden, rtol=1e-5, atol=1e-5)
    assert fast_grads.keys() == grads.keys()
    largest = max(float(grad.abs().max()) for grad in grads.values())
    for name, grad in grads.items():
        difference = float((fast_grads[name] - grad).abs().max())
        # Sums over 36 tokens that nearly cancel (those of queries) keep few digits in fp32, here and there.
        assert difference < 5e-6 * largest, (name, difference, largest)
        assert difference < 1e-3 * float(grad.abs().max()), (name, difference)


@pytest.mark.parametrize("method", METHODS)
def test_recomputing_changes_no_bit(method: str) -> None:
    model, key = build("llama", method)
    model.fast = backbone.install(model, "auto", torch.float32)
    hidden, grads = outcome(model, key, batch_of(False))
    for block in model.blocks:
        block.recompute = True
    again, grads_again = outcome(model, key, batch_of(False))
    assert torch.equal(hidden, again)
    assert all(torch.equal(grads[name], grads_again[name]) for name in grads)


@pytest.mark.parametrize("tile", [1, 7, 12, 100])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_tiles_of_the_mlp_give_the_outputs_and_gradients_of_the_whole(family: str, method: str, tile: int) -> None:
    model, key = build(family, method)
    model.fast = backbone.install(model, "auto", torch.float32)
    for block in model.blocks:
        block.recompute = True
    hidden, grads = outcome(model, key, batch_of(False))
    backbone.install(model, "auto", torch.float32, tile)
    tiled, tiled_grads = outcome(model, key, batch_of(False))
    torch.testing.assert_close(tiled, hidden, rtol=1e-6, atol=2e-6)
    assert tiled_grads.keys() == grads.keys()
    largest = max(float(grad.abs().max()) for grad in grads.values())
    for name, grad in grads.items():
        assert float((tiled_grads[name] - grad).abs().max()) < 2e-6 * largest, name


@pytest.mark.parametrize(("family", "packed"), [("llama", True), ("mistral-window", False)])
def test_a_named_kernel_is_not_left_for_another_without_a_word(family: str, packed: bool) -> None:
    model, key = build(family, "full")
    model.fast = backbone.install(model, "math", torch.float32)
    with pytest.raises(ModelError, match="the math kernel of attention cannot run"):
        outcome(model, key, batch_of(packed))


def test_a_kernel_that_has_no_cpu_form_is_refused_by_name() -> None:
    model, key = build("llama", "full")
    model.fast = backbone.install(model, "cudnn", torch.float32)
    with pytest.raises(ModelError, match="the cudnn kernel of attention cannot run"):
        outcome(model, key, batch_of(False))
