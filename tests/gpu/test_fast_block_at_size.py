"""One Llama-3-8B decoder layer in bf16: the fast block is as near to fp32 as transformers' own layer and peft are."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama import modeling_llama

from finetune.config.schema import Recipe
from finetune.memory import activations, checkpointing
from finetune.memory.storage import Work, storage_of
from finetune.models.fast.attention import Look
from finetune.models.fast.block import FastBlock, Inputs
from finetune.models.shapes import shape_of

pytestmark = pytest.mark.gpu
LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def layer_of(lora: bool) -> tuple[nn.Module, LlamaConfig]:
    config = LlamaConfig(
        vocab_size=256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=1, num_attention_heads=32,
        num_key_value_heads=8, rope_theta=500000.0,
    )  # fmt: skip
    config._attn_implementation = "sdpa"
    torch.manual_seed(0)
    with torch.device("cuda"):
        layer = modeling_llama.LlamaDecoderLayer(config, 0)
    for name, parameter in layer.named_parameters():
        parameter.data = 1 + torch.randn_like(parameter) * 0.1 if "norm" in name else torch.randn_like(parameter) * 0.02
    layer = layer.bfloat16()
    if lora:
        layer.requires_grad_(False)
        inject_adapter_in_model(LoraConfig(r=16, lora_alpha=32, target_modules=LINEARS), layer)
        for name, parameter in layer.named_parameters():
            if "lora_" in name:
                parameter.data = torch.randn_like(parameter.float()) * (0.05 if "lora_B" in name else 0.02)
    return layer.train(), config


def outcome(call: Any, layer: nn.Module, x: Tensor, grad: Tensor, autocast: bool) -> dict[str, Tensor]:
    own = x.detach().requires_grad_()
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        out = call(own)
    out = out[0] if isinstance(out, tuple) else out
    out.backward(grad.to(out.dtype))
    found = {"out": out.detach(), "x": own.grad}
    found |= {name: p.grad for name, p in layer.named_parameters() if p.grad is not None}
    found = {name: value.float().clone() for name, value in found.items()}
    layer.zero_grad()
    return found


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("lora", [False, True])
def test_errors_against_fp32_are_no_larger_than_transformers(lora: bool, recompute: bool) -> None:
    layer, config = layer_of(lora)
    x = torch.randn(2, 2048, 4096, device="cuda").bfloat16()
    grad = torch.randn_like(x)
    tables = modeling_llama.LlamaRotaryEmbedding(config).cuda()(x.float(), torch.arange(2048, device="cuda")[None])
    narrow = tuple(table.bfloat16() for table in tables)

    def plain(which: nn.Module, angles: tuple[Tensor, ...]) -> Any:
        return lambda own: which(own, attention_mask=None, position_embeddings=angles)

    exact = copy.deepcopy(layer).float()
    truth = outcome(plain(exact, tables), exact, x.float(), grad.float(), autocast=False)
    theirs = outcome(plain(layer, narrow), layer, x, grad, autocast=lora)
    block = FastBlock(layer)
    block.recompute = recompute
    inputs = Inputs(*narrow, Look(), torch.bfloat16)
    ours = outcome(lambda own: block(own, inputs=inputs), block, x, grad, autocast=False)
    assert ours.keys() == theirs.keys() == truth.keys()
    for name, right in truth.items():
        error = [float((found[name] - right).norm() / right.norm()) for found in (ours, theirs)]
        assert error[0] <= 1.1 * error[1] + 1e-4, (name, error)
        assert error[0] < 0.02, (name, error)


@pytest.mark.parametrize("lora", [False, True])
def test_an_mlp_in_tiles_gives_the_same_values_and_frees_what_the_plan_says(lora: bool) -> None:
    """16,384 tokens in tiles of 2,048."""
    layer, config = layer_of(lora)
    x = torch.randn(4, 4096, 4096, device="cuda").bfloat16()
    grad = torch.randn_like(x)
    tables = modeling_llama.LlamaRotaryEmbedding(config).cuda()(x, torch.arange(4096, device="cuda")[None])
    block, inputs = FastBlock(layer), Inputs(*tables, Look("flash"), torch.bfloat16)
    block.recompute = True
    found, peaks = [], []
    for tile in (0, 2048):
        block.mlp_tile = tile
        found.append(outcome(lambda own: block(own, inputs=inputs), block, x, grad, autocast=False))
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        block.gradients(x, grad, inputs, True)
        peaks.append(torch.cuda.max_memory_allocated() - before)
        layer.zero_grad()
    whole, tiled = found
    assert whole.keys() == tiled.keys()
    for name, right in whole.items():
        assert float((tiled[name] - right).norm() / right.norm()) < 0.01, name
    adapter = {"kind": "lora", "rank": 16, "targets": LINEARS} if lora else {"kind": "none"}
    model = {"path": "x", "trained": "fp32" if lora else "stochastic"}
    recipe = Recipe.model_validate({"model": model, "adapter": adapter, "plan": {"fast_block": True}})
    shape = shape_of(config)
    storage = storage_of(shape, recipe, "bf16", "cuda")
    planned = []
    for tile in (0, 2048):
        work = Work(4, 4096, tile)
        again = checkpointing.recomputed_bytes(shape, storage, work, True)
        planned.append(again + activations.block_workspace(shape, storage, work))
    assert planned[0] - planned[1] == pytest.approx(peaks[0] - peaks[1], rel=0.05), (planned, peaks)
