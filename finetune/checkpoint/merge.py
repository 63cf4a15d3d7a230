"""The weights of base plus adapter as one plain state dictionary, without touching the live model.

Each weight is taken to fp32, the adapter's product is made and added in fp32, and the sum is cast once: merging in 16
bits rounds the product, the sum and the weight one after the other. A quantised base is decoded first and the result
stays in 16 or 32 bits, since rounding the sum back to 4 bits would throw the adapter away. One layer at a time is in
fp32. Formulas: LoRA, W + s B A (https://arxiv.org/abs/2106.09685); DoRA, m (W + s B A) / |W + s B A| by output row
(https://arxiv.org/abs/2402.09353).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from peft.tuners.lora import Embedding as LoraEmbedding
from peft.tuners.lora import LoraLayer
from peft.tuners.lora.variants import DoraLinearVariant
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import AuxiliaryTrainingWrapper, ModulesToSaveWrapper, TrainableTokensWrapper
from torch import Tensor, nn

from finetune.errors import CheckpointError
from finetune.kernels.stored_linear import StoredLinear

STOP = (BaseTunerLayer, AuxiliaryTrainingWrapper)
"""Modules that an adapter put in place of one of the base; their inside is not part of the plain model."""


@dataclass(frozen=True)
class Merged:
    """Plain weights by the base's own names, in one type, on the host; and how far the one cast moved them."""

    tensors: dict[str, Tensor]
    dtype: torch.dtype
    rounding_max: float
    rounding_mean: float


def merge_faults(base: nn.Module) -> list[str]:
    """What of this model cannot be merged, by name; empty when all can."""
    return [f"{name}: {fault}" for name, module in _plain_modules(base) if (fault := _module_fault(module))]


def merge_notices(base: nn.Module) -> list[str]:
    """What the user should know of a merge of this model."""
    kinds = Counter(kind for _, module in _plain_modules(base) if (kind := _stored_as(_inner(module))))
    dora = any(isinstance(module, LoraLayer) and module.lora_magnitude_vector for _, module in _plain_modules(base))
    approximate = "; DoRA's norms were trained on rounded weights, so the merge is approximate" if dora else ""
    return [
        f"the base's {count} {kind} layers are dequantised: the result is in 16 or 32 bits{approximate}"
        for kind, count in kinds.items()
    ]


def base_dtype(base: nn.Module) -> torch.dtype:
    """The type that most of the base's weights have, 4-bit ones counted as what they were quantised from."""
    counts: Counter[torch.dtype] = Counter()
    for _, module in _plain_modules(base):
        inner = _inner(module)
        if isinstance(inner, StoredLinear):
            counts[inner.dtype] += inner.codes.numel()
        for parameter in _inner(module).parameters(recurse=False):
            if _is_4bit(_inner(module)) and hasattr(parameter, "quant_state"):
                counts[parameter.quant_state.dtype] += parameter.quant_state.shape.numel()
            elif parameter.is_floating_point():
                counts[parameter.dtype] += parameter.numel()
    return counts.most_common(1)[0][0] if counts else torch.float32


@torch.no_grad()
def merge(base: nn.Module, dtype: torch.dtype | None = None) -> Merged:
    """The weights of `base` (a transformers model, adapter layers inside or not) in `dtype`, by default that of most weights.

    Tied tensors stay one tensor under both names. CheckpointError lists layers that cannot be merged.
    """
    faults = merge_faults(base)
    if faults:
        remedy = "export the adapter instead (to=adapter), or merge with the tool that made it"
        raise CheckpointError(f"{len(faults)} layers cannot be merged: {'; '.join(faults[:3])}", "export", remedy)
    kind = dtype or base_dtype(base)
    tensors: dict[str, Tensor] = {}
    done: dict[tuple[int, ...], Tensor] = {}
    largest, moved, elements = 0.0, 0.0, 0
    for prefix, module in _plain_modules(base):
        for leaf, sources, exact in _weights(module):
            name = f"{prefix}.{leaf}" if prefix else leaf
            if sources not in done:
                full = exact()
                cast = full.to(kind)
                if kind != torch.float32 and full.numel():
                    gap = (full - cast.float()).abs()
                    largest, moved = max(largest, gap.max().item()), moved + gap.double().sum().item()
                elements += full.numel()
                done[sources] = cast.cpu()
            tensors[name] = done[sources]
        for leaf, buffer in _saved_buffers(_inner(module)).items():
            tensors[f"{prefix}.{leaf}" if prefix else leaf] = buffer.detach().cpu()
    return Merged(tensors, kind, largest, moved / max(elements, 1))


def _plain_modules(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Modules by the names they have in the plain model: a trained copy in place of its original, adapter layers unopened."""
    if isinstance(module, ModulesToSaveWrapper) and len(module.active_adapters) == 1:
        yield from _plain_modules(module.modules_to_save[module.active_adapters[0]], prefix)
        return
    yield prefix, module
    if not isinstance(module, STOP):
        for name, child in module.named_children():
            yield from _plain_modules(child, f"{prefix}.{name}" if prefix else name)


def _inner(module: nn.Module) -> nn.Module:
    """The module whose weights count: the base of an adapter layer or of trained token rows, else itself."""
    if isinstance(module, TrainableTokensWrapper):
        return module.token_adapter.base_layer
    return module.get_base_layer() if isinstance(module, BaseTunerLayer) else module


def _saved_buffers(module: nn.Module) -> dict[str, Tensor]:
    """The module's own buffers that belong into a file, by their last name."""
    buffers = {} if isinstance(module, StoredLinear) else dict(module.named_buffers(recurse=False))
    saved = module.state_dict() if buffers else {}
    return {name: buffer for name, buffer in buffers.items() if name in saved}


def _weights(module: nn.Module) -> Iterator[tuple[str, tuple[int, ...], Callable[[], Tensor]]]:
    """(last name, identities of what it is made of, function that gives it in fp32) of a module's own weights."""
    inner = _inner(module)
    own: dict[str, Tensor] = dict(inner.named_parameters(recurse=False))
    if isinstance(inner, StoredLinear):
        own = {"weight": inner.codes, **own}
    for name, parameter in own.items():
        if isinstance(module, TrainableTokensWrapper) and name == "weight":
            trained = module.token_adapter.trainable_tokens_delta[module.active_adapters[0]]
            yield name, (id(parameter), id(trained)), partial(_with_rows, parameter, trained, _ids(module))
            continue
        if isinstance(inner, StoredLinear) and name == "weight":
            plain = partial(_decoded, inner)
        else:
            plain = partial(_dequantised if name == "weight" and _is_4bit(inner) else _full, parameter)
        if isinstance(module, LoraLayer) and name == "weight":
            yield name, (id(parameter), id(module)), partial(_with_adapter, module, plain)
        elif isinstance(module, LoraLayer) and _bias_delta(module) is not None:
            yield name, (id(parameter), id(module)), partial(_with_bias, module, plain)
        else:
            yield name, (id(parameter),), plain


def _ids(module: TrainableTokensWrapper) -> list[int]:
    return list(module.token_adapter.token_indices[module.active_adapters[0]])


def _with_rows(parameter: Tensor, trained_ND: Tensor, ids: list[int]) -> Tensor:
    """The matrix with the rows of trained tokens in place of its own."""
    full_VD = parameter.detach().float().clone()
    full_VD[ids] = trained_ND.detach().float()
    return full_VD


def _full(parameter: nn.Parameter) -> Tensor:
    return parameter.detach().float()


def _decoded(layer: StoredLinear) -> Tensor:
    return layer.weight.float()


def _stored_as(module: nn.Module) -> str:
    """How the module's weight is stored where that is not as it computes: 4-bit, int8 or fp8; else empty."""
    return "4-bit" if _is_4bit(module) else module.kind if isinstance(module, StoredLinear) else ""


def _with_bias(layer: LoraLayer, plain: Callable[[], Tensor]) -> Tensor:
    return plain() + _bias_delta(layer)


def _with_adapter(layer: LoraLayer, plain: Callable[[], Tensor]) -> Tensor:
    """W + s B A in fp32 for every active adapter; with DoRA, rows rescaled to its magnitudes."""
    result = plain()
    for adapter in layer.active_adapters:
        if isinstance(layer, LoraEmbedding) and adapter in layer.lora_embedding_A:
            product = layer.lora_embedding_B[adapter].float() @ layer.lora_embedding_A[adapter].float()
            result = result + layer.scaling[adapter] * product.T
        elif adapter in layer.lora_A:
            product = layer.lora_B[adapter].weight.float() @ layer.lora_A[adapter].weight.float()
            result = result + layer.scaling[adapter] * (product.T if layer.fan_in_fan_out else product)
            if adapter in layer.lora_magnitude_vector:
                rows = result.T if layer.fan_in_fan_out else result
                magnitude = layer.lora_magnitude_vector[adapter].weight.float()
                rows = rows * (magnitude / rows.norm(dim=1)).unsqueeze(1)
                result = rows.T if layer.fan_in_fan_out else rows
    return result


def _bias_delta(layer: LoraLayer) -> Tensor | None:
    """What a LoRA pair with a bias of its own adds to the layer's; None without."""
    total = None
    for adapter in layer.active_adapters:
        bias = layer.lora_B[adapter].bias if adapter in layer.lora_B else None
        if bias is not None:
            added = layer.scaling[adapter] * bias.float()
            total = added if total is None else total + added
    return total


def _is_4bit(module: nn.Module) -> bool:
    return getattr(getattr(module, "weight", None), "quant_state", None) is not None


def _dequantised(weight: nn.Parameter) -> Tensor:
    """The weight as the live 4-bit layer uses it (in the type it was quantised from), then in fp32."""
    from bitsandbytes.functional import dequantize_4bit

    return dequantize_4bit(weight.data, weight.quant_state).float()


def _module_fault(module: nn.Module) -> str:
    if isinstance(module, ModulesToSaveWrapper):
        return "several trained copies are active, or none"
    if isinstance(module, TrainableTokensWrapper):
        return "" if len(module.active_adapters) == 1 else "several sets of token rows are active, or none"
    if isinstance(module, AuxiliaryTrainingWrapper):
        return f"{type(module).__name__} is not supported"
    if isinstance(module, BaseTunerLayer):
        return _layer_fault(module)
    weight = getattr(module, "weight", None)
    if getattr(getattr(weight, "quant_state", None), "packing_format_for_cpu", False):
        return "bitsandbytes repacked its 4-bit weights for inference on this CPU; load the model again to merge it"
    if weight is not None and not _is_4bit(module) and type(weight).__name__ in ("Int8Params", "Params4bit"):
        return f"weights stored as {type(weight).__name__} are not supported"
    return ""


def _layer_fault(layer: BaseTunerLayer) -> str:
    kind = f"{type(layer).__module__}.{type(layer).__name__}"
    if not isinstance(layer, LoraLayer) or not isinstance(_inner(layer), nn.Module):
        return f"{kind} is not a LoRA layer"
    if layer.merged:
        return "the adapter is merged into the live model already"
    if not isinstance(layer, LoraEmbedding) and not (hasattr(layer, "lora_A") and hasattr(layer, "fan_in_fan_out")):
        return f"{kind} is not a linear layer"
    if any(parameter.dim() != 2 for name, parameter in _inner(layer).named_parameters() if name == "weight"):
        return f"{kind} is not a linear layer"
    for adapter, variant in layer.lora_variant.items():
        allowed = variant is None or type(variant) is DoraLinearVariant
        if adapter in layer.active_adapters and not allowed:
            return f"the LoRA variant {type(variant).__name__} is not supported"
    if _bias_delta(layer) is not None and getattr(_inner(layer), "bias", None) is None:
        return "its adapter has a bias and the layer has none"
    return _module_fault(_inner(layer)) if not isinstance(_inner(layer), STOP) else "adapters inside adapters"
