"""Causal attention over whole rows or over the documents packed into them, by the backend the plan names.

Rows of one document take the causal kernels of scaled_dot_product_attention. Packed rows take variable-length attention
where a GPU has it: it never looks across documents, so neither a mask nor work for one exists. Elsewhere a
block-diagonal mask does the same.

Legend: B rows, S positions, H query heads, G key-value heads, D width of a head.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

BACKENDS: dict[str, SDPBackend] = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
"""Values of plan.attention that name one kernel."""


@dataclass(frozen=True)
class Documents:
    """Where documents of a packed batch begin, all rows one after the other: int32 [documents + 1], and the longest."""

    starts: Tensor
    longest: int


@dataclass(frozen=True)
class Look:
    """What every layer's attention is given: the kernel's name (`auto`, `deterministic`: torch chooses), and for packed rows `documents`
    (variable-length kernels) or `masks` by window (bool [B, 1, S, S])."""

    backend: str = "auto"
    documents: Documents | None = None
    masks: dict[int | None, Tensor] | None = None


def attend(q_BSHD: Tensor, k_BSGD: Tensor, v_BSGD: Tensor, look: Look, window: int | None, scale: float) -> Tensor:
    """softmax(scale q k^T) v [B, S, H, D] over what each position may see: earlier ones, of its own document, and with a
    window those at most window - 1 before it."""
    if look.documents is not None:
        return _varlen(q_BSHD, k_BSGD, v_BSGD, look.documents, window, scale)
    mask = None if look.masks is None else look.masks[window]
    grouped = q_BSHD.shape[2] != k_BSGD.shape[2]
    if mask is None and window is not None and q_BSHD.shape[1] > window:
        mask = window_mask(q_BSHD.shape[1], window, q_BSHD.device)
    with _kernel(look.backend if mask is None else "auto"):
        out_BHSD = functional.scaled_dot_product_attention(
            q_BSHD.transpose(1, 2), k_BSGD.transpose(1, 2), v_BSGD.transpose(1, 2), attn_mask=mask,
            is_causal=mask is None, scale=scale, enable_gqa=grouped,
        )  # fmt: skip
    return out_BHSD.transpose(1, 2)


def window_mask(length: int, window: int, device: torch.device) -> Tensor:
    """bool [1, 1, S, S]: position q sees k when 0 <= q - k < window."""
    places = torch.arange(length, device=device)
    distance = places[:, None] - places[None, :]
    return ((distance >= 0) & (distance < window))[None, None]


def documents_of(document_ids_BS: Tensor) -> Documents:
    """The starts of the runs of equal ids, row by row. Waits for the device once."""
    rows, length = document_ids_BS.shape
    fresh_BS = torch.ones_like(document_ids_BS, dtype=torch.bool)
    fresh_BS[:, 1:] = document_ids_BS[:, 1:] != document_ids_BS[:, :-1]
    starts = fresh_BS.flatten().nonzero().flatten().to(torch.int32)
    end = torch.tensor([rows * length], dtype=torch.int32, device=starts.device)
    starts = torch.cat([starts, end])
    return Documents(starts, int((starts[1:] - starts[:-1]).max()))


def varlen_function() -> Callable[..., Any] | None:
    """torch's variable-length attention, where this torch has it."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return varlen_attn


def _varlen(
    q_BSHD: Tensor, k_BSGD: Tensor, v_BSGD: Tensor, documents: Documents, window: int | None, scale: float
) -> Tensor:
    function = varlen_function()
    assert function is not None
    names = inspect.signature(function).parameters
    options: dict[str, Any] = {"scale": scale}
    if "window_size" in names:
        options["window_size"] = (-1 if window is None else window - 1, 0)
    elif window is None:
        options["is_causal"] = True
    if "enable_gqa" in names:
        options["enable_gqa"] = q_BSHD.shape[2] != k_BSGD.shape[2]
    starts, longest = documents.starts, documents.longest
    flat = (q_BSHD.flatten(0, 1), k_BSGD.flatten(0, 1), v_BSGD.flatten(0, 1))
    out: Tensor = function(*flat, starts, starts, longest, longest, **options)
    return out.view(q_BSHD.shape)


def _kernel(backend: str) -> AbstractContextManager[None]:
    """The named kernel first; the others for shapes that it does not take (cuDNN: rows of one token)."""
    if backend in ("auto", "deterministic"):
        return nullcontext()
    first = BACKENDS[backend]
    return sdpa_kernel([first, *(other for other in BACKENDS.values() if other != first)], set_priority=True)
