"""A linear module of a block, bare, quantised or under peft's LoRA, seen as a leaf of `kernels/adapted_linear`.

Modules stay where they are, so names, saving, merging and export do not change; only who multiplies does. What is not
plain LoRA (several adapters, DoRA, biases of adapters) has no leaf, and the block calls such a module as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from finetune.kernels.adapted_linear import Adapter, Draws, Leaf
from finetune.kernels.keyed_dropout import KeyedDropout, row_keys
from finetune.models.quantized import dequantised, is_linear

VARIANTS = ("use_dora", "lora_bias", "lora_variant")
"""Settings of peft's layers that are not plain LoRA: dicts by adapter name."""


def plain(module: nn.Module) -> bool:
    """Whether `leaf` can describe the module."""
    if is_linear(module):
        return True
    if not hasattr(module, "lora_A") or not is_linear(_base(module)):
        return False
    layer: Any = module
    names = list(layer.active_adapters)
    if len(names) > 1 or len(layer.lora_A) > 1:
        return False
    special = any(bool(getattr(layer, field, {}).get(name)) for field in VARIANTS for name in names)
    dropouts = all(isinstance(layer.lora_dropout[name], nn.Identity | nn.Dropout | KeyedDropout) for name in names)
    return not special and dropouts and all(name in layer.lora_A for name in names)


def leaf(module: nn.Module, dtype: torch.dtype, decoded: Mapping[nn.Module, Tensor] | None = None) -> Leaf:
    """The module's weights as they act now: an adapter that is switched off or merged is left out.

    `decoded` holds weights that were decoded before, by the linear that stores them.
    """
    base: Any = _base(module)
    weight = base.weight
    trained = weight.requires_grad
    bias = getattr(base, "bias", None)
    frozen = None if trained else _decoded(base, dtype, decoded or {})
    return Leaf(frozen, weight if trained else None, bias, _adapter(module))


def _base(module: Any) -> nn.Module:
    return module.get_base_layer() if hasattr(module, "lora_A") else module


def decoded_once(modules: Iterable[nn.Module], dtype: torch.dtype) -> dict[nn.Module, Tensor]:
    """The decoded weight of each of these linears that is stored in 4 or 8 bits."""
    bases = [_base(module) for module in modules]
    return {base: dequantised(base).to(dtype) for base in bases if type(base) is not nn.Linear}


def _decoded(base: nn.Module, dtype: torch.dtype, known: Mapping[nn.Module, Tensor]) -> Callable[[], Tensor]:
    def weight() -> Tensor:
        return known[base] if base in known else dequantised(base).to(dtype)

    return weight


def _adapter(module: Any) -> Adapter | None:
    if not hasattr(module, "lora_A") or module.disable_adapters or module.merged or not module.active_adapters:
        return None
    name = module.active_adapters[0]
    dropout = module.lora_dropout[name]
    draws = None
    if module.training and getattr(dropout, "p", 0.0):
        key = dropout.key
        draws = Draws(row_keys(key.seed, key.step, dropout.index, key.row_ids_B), dropout.p)
    return Adapter(module.lora_A[name].weight, module.lora_B[name].weight, module.scaling[name], draws)
