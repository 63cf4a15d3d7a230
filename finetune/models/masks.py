"""Masks that keep packed documents apart, and which layers of a model look through a window.

Legend: B rows, S positions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from finetune.errors import ModelError

WINDOW_EVERYWHERE = ("blt", "doge", "ministral3", "mistral", "mixtral", "phi3", "phimoe", "qwen3_moe", "starcoder2")
"""Model types whose every layer is windowed as soon as config.sliding_window is a number (they have no layer_types)."""
KNOWN_LAYERS = {"full_attention", "sliding_attention"}


def document_mask(document_ids_BS: Tensor, window: int | None = None) -> Tensor:
    """bool [B, 1, S, S]: position q sees k when k <= q, both are of one document and, with a window, q - k < window.

    Every position sees itself, padding too, so no row of the attention is empty.
    """
    length = document_ids_BS.shape[1]
    places_S = torch.arange(length, device=document_ids_BS.device)
    distance_SS = places_S[:, None] - places_S[None, :]
    allowed_SS = distance_SS >= 0
    if window is not None:
        allowed_SS = allowed_SS & (distance_SS < window)
    same_BSS = document_ids_BS[:, :, None] == document_ids_BS[:, None, :]
    return (same_BSS & allowed_SS)[:, None]


def additive_mask(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where allowed, the dtype's lowest number elsewhere: eager attention adds its mask to the scores."""
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, torch.finfo(dtype).min)


def attention_windows(config: Any) -> dict[str, int | None]:
    """Layer type: its window (None: none). Raises ModelError when the kinds of attention are not known."""
    window = getattr(config, "sliding_window", None)
    layer_types = getattr(config, "layer_types", None)
    if layer_types is None:
        if window is None:
            return {"full_attention": None}
        if config.model_type in WINDOW_EVERYWHERE:
            return {"sliding_attention": window}
        raise ModelError(
            f"model type {config.model_type} has sliding_window={window} and does not say which layers use it",
            where="data.pack",
            remedy="set data.pack=false",
        )
    unknown = sorted(set(layer_types) - KNOWN_LAYERS)
    if unknown:
        raise ModelError(
            f"model type {config.model_type} has layers ({', '.join(unknown)}) in which packed documents would mix",
            where="data.pack",
            remedy="set data.pack=false",
        )
    return {kind: window if kind == "sliding_attention" else None for kind in sorted(set(layer_types))}
