"""A causal LM of transformers seen as backbone, blocks and head, and hidden states through which packing cannot leak.

A packed row gets an explicit block-diagonal causal mask, the same on every attention backend, instead of the detection
from positions that transformers switches off without a word when a cache or a mask is present. It costs S x S bits of
bool a row (a float for eager attention) once a forward. Rows of one document get no mask at all: padding stands on the
right, where causal order already hides it, and its labels are ignored.

Legend: B rows, S positions, D hidden width, V vocabulary, R adapter rank.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from finetune.contracts import Batch, Model, Shape
from finetune.errors import ModelError
from finetune.models.fast import backbone
from finetune.models.masks import additive_mask, attention_windows, document_mask


def assemble(module: nn.Module, tokenizer: Any, shape: Shape, source: str, notices: tuple[str, ...] = ()) -> Model:
    """The parts of `module`: a transformers causal LM, or peft's wrapper around one. Raises ModelError by name."""
    base = module.get_base_model() if hasattr(module, "get_base_model") else module
    backbone, head = find_backbone(base), base.get_output_embeddings()
    if head is None:
        raise ModelError(f"{type(base).__name__} has no output projection", remedy="use a causal language model")
    return Model(module, base, backbone, head, find_blocks(base), tokenizer, shape, source, notices)


def find_backbone(base: nn.Module) -> nn.Module:
    """The part of a causal LM that ends with the hidden states."""
    backbone = getattr(base, "base_model", base)
    if backbone is base:
        raise ModelError(
            f"{type(base).__name__} has no backbone apart from its head", remedy="use a causal language model"
        )
    return backbone


def find_blocks(base: nn.Module) -> list[nn.Module]:
    """The repeated units: the one list of modules in the backbone that has config.num_hidden_layers entries."""
    wanted = getattr(base.config, "num_hidden_layers", None)
    lists = [child for child in find_backbone(base).modules() if isinstance(child, nn.ModuleList)]
    largest = max(lists, key=lambda blocks: sum(p.numel() for p in blocks.parameters()), default=None)
    if largest is None or len(largest) != wanted:
        have = "none" if largest is None else str(len(largest))
        raise ModelError(
            f"{type(base).__name__} has no list of {wanted} repeated blocks (found: {have})",
            remedy="use a decoder whose layers are a repeated block, such as Llama, Mistral or Qwen",
        )
    return list(largest)


def hidden_states(model: Model, batch: Batch) -> Tensor:
    """[B, S, D], the head's input. Documents of a packed row do not see each other, nor does any document the padding.

    Adapters act, since peft puts its layers into the backbone itself. Raises ModelError when the batch is packed and
    the model's attention has no known mask.
    """
    if model.fast is not None:
        return backbone.hidden_states(model, batch, model.fast)
    arguments: dict[str, Any] = {"input_ids": batch.input_ids, "use_cache": False, "return_dict": True}
    if batch.document_ids is not None:
        arguments["attention_mask"] = packed_masks(model, batch.document_ids)
        arguments["position_ids"] = batch.positions
    return model.backbone(**arguments).last_hidden_state


def packed_masks(model: Model, document_ids_BS: Tensor) -> Tensor | dict[str, Tensor]:
    """The mask for every layer, or a dict with one for each layer type where a model mixes them."""
    config = model.base.config
    windows = attention_windows(config)
    dtype = model.base.get_input_embeddings().weight.dtype
    additive = config._attn_implementation == "eager"
    masks = {}
    for kind, window in windows.items():
        mask = document_mask(document_ids_BS, window)
        masks[kind] = additive_mask(mask, dtype) if additive else mask
    return next(iter(masks.values())) if len(masks) == 1 else masks


def learned_positions(model: Model) -> int | None:
    """How many positions a model with a table of learned ones has; None where they are computed (rotary, ALiBi)."""
    made_for, tokens = model.shape.positions, model.base.get_input_embeddings().weight
    tables = [part for part in model.backbone.modules() if isinstance(part, nn.Embedding) and part.weight is not tokens]
    # Some tables begin with two rows that are no positions (OPT).
    return made_for if any(part.num_embeddings - made_for in (0, 1, 2) for part in tables) else None


def head_weight(model: Model) -> tuple[Tensor, Tensor | None]:
    """The head's weight [V, D] and bias as they act, differentiable: with an adapter on the head, W + scale * B A.

    A loss that multiplies by the head itself must use this and not `head.weight`, which leaves the adapter out.
    """
    head = model.head
    if not hasattr(head, "lora_A"):
        return head.weight, head.bias
    base = head.get_base_layer()
    name = head.active_adapters[0]
    a_RD, b_VR = head.lora_A[name].weight, head.lora_B[name].weight
    # In the adapter's fp32: a bf16 sum would round most of the adapter away.
    with torch.autocast(a_RD.device.type, enabled=False):
        return base.weight.to(a_RD.dtype) + (b_VR @ a_RD) * head.scaling[name], base.bias
