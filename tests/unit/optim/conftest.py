"""Small parameters with the names of a real model, and how to step and measure an optimizer over them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

SHAPES: dict[str, tuple[int, ...]] = {
    "model.embed_tokens.weight": (64, 128),
    "model.layers.0.self_attn.q_proj.weight": (128, 64),
    "model.layers.0.self_attn.odd.weight": (61, 101),
    "model.layers.0.self_attn.q_proj.lora_A.default.weight": (4, 32),
    "model.layers.0.input_layernorm.weight": (128,),
    "lm_head.weight": (64, 128),
}


def parameters(
    shapes: Mapping[str, tuple[int, ...]] = SHAPES, seed: int = 0, dtype: torch.dtype = torch.float32
) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: nn.Parameter((torch.randn(shape, generator=generator) * 0.1).to(dtype)) for name, shape in shapes.items()
    }


def take_steps(optimizer: torch.optim.Optimizer, named: Mapping[str, nn.Parameter], steps: range | int) -> None:
    """Steps with gradients that depend on the step's number alone."""
    for step in range(steps) if isinstance(steps, int) else steps:
        generator = torch.Generator().manual_seed(100 + step)
        for parameter in named.values():
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        optimizer.step()


def measured_bytes(optimizer: torch.optim.Optimizer) -> int:
    storages = {
        value.untyped_storage().data_ptr(): value.untyped_storage().nbytes()
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    }
    return sum(storages.values())
