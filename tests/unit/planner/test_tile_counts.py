"""Bytes of a block whose MLP goes in tiles, as the plan counts them, against tensors that live in one block's turn.

On a CPU kernels are plain operations with temporaries of their own; where they are no wider than what is looked at (small
slices of the gate's backward, moments that no norm is in), the count is the one of the formulas.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import nn
from transformers import LlamaConfig
from transformers.models.llama import modeling_llama

from finetune.config.schema import Recipe
from finetune.contracts import Shape
from finetune.kernels import swiglu
from finetune.memory import activations, checkpointing
from finetune.memory.storage import Storage, Work, storage_of
from finetune.models.fast.attention import Look
from finetune.models.fast.block import FastBlock, Inputs
from finetune.models.shapes import shape_of
from tests.unit.planner.live_bytes import LiveBytes

LENGTH, ROWS, WIDE = 512, 4, 224
LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
FP32 = 4


def counted(kind: str, keys: int, tile: int) -> tuple[int, int, Shape, Storage]:
    """The widest bytes of a block's forward and of its turn backward, its input and the stream's gradient among them."""
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=WIDE, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=keys,
    )  # fmt: skip
    config._attn_implementation = "sdpa"
    layer: nn.Module = modeling_llama.LlamaDecoderLayer(config, 0)
    if kind == "lora":
        layer.requires_grad_(False)
        inject_adapter_in_model(LoraConfig(r=4, target_modules=LINEARS), layer)
    block = FastBlock(layer.train())
    block.mlp_tile = tile
    tables = modeling_llama.LlamaRotaryEmbedding(config)(torch.zeros(1), torch.arange(LENGTH)[None])
    x, grad = torch.randn(2, ROWS, LENGTH, 64)
    inputs = Inputs(*tables, Look(), torch.float32)
    with torch.no_grad(), LiveBytes() as forward:
        block.whole_of(x, inputs)
    with LiveBytes() as backward:
        block.gradients(x, grad, inputs, True)
    recipe: dict[str, Any] = {"model": {"path": "x"}, "plan": {"fast_block": True}, "adapter": {"kind": "none"}}
    if kind == "lora":
        recipe["adapter"] = {"kind": "lora", "rank": 4, "targets": LINEARS}
    shape = shape_of(config)
    each = FP32 * 64 * ROWS * LENGTH
    storage = storage_of(shape, Recipe.model_validate(recipe), "fp32")
    # The forward's input is counted as "the stream before"; backward's is a boundary, its gradient in the workspace.
    return forward.peak + each, backward.peak + each, shape, storage


@pytest.mark.parametrize("keys", [2, 4])
@pytest.mark.parametrize("kind", ["lora", "full"])
@pytest.mark.parametrize("tile", [0, 64, 1024, 1500, 4096])
def test_a_block_in_tiles_needs_what_the_plan_counts(
    kind: str, keys: int, tile: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(swiglu, "SLICE_ELEMENTS", 2**10)
    forward, backward, shape, storage = counted(kind, keys, tile)
    work = Work(ROWS, LENGTH, tile)
    planned = checkpointing.recomputed_bytes(shape, storage, work, True)
    planned += activations.block_workspace(shape, storage, work)
    assert planned == pytest.approx(backward, rel=0.03)
    if tile >= 1024 or not tile:
        # In small tiles the plain norm's temporaries are the widest of a forward.
        assert activations.forward_workspace(shape, storage, work) == pytest.approx(forward, rel=0.03)
