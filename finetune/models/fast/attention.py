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
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from finetune.errors import ModelError
from finetune.kernels.determinism import repeatable

BACKENDS: dict[str, SDPBackend] = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
"""Values of plan.attention that name one kernel."""
NO_KERNEL = ("No available kernel", "No viable backend")
"""How torch says, on a GPU and on a CPU, that the only kernel it may take is not for these tensors."""


@dataclass(frozen=True)
class Documents:
    """Where documents of a packed batch begin, all rows one after the other: int32 [documents + 1], and the longest."""

    starts: Tensor
    longest: int


@dataclass(frozen=True)
class Look:
    """What every layer's attention is given: the kernel's name (`auto`: torch chooses; `deterministic`: one whose backward
    gives the same bits again; a name of BACKENDS runs that one or raises ModelError), and for packed rows `documents`
    (variable-length kernels) or `masks` by window (bool [B, 1, S, S])."""

    backend: str = "auto"
    documents: Documents | None = None
    masks: dict[int | None, Tensor] | None = None


def attend(q_BSHD: Tensor, k_BSGD: Tensor, v_BSGD: Tensor, look: Look, window: int | None, scale: float) -> Tensor:
    """softmax(scale q k^T) v [B, S, H, D] over what each position may see: earlier ones, of its own document, and with a
    window those at most window - 1 before it."""
    if look.documents is not None:
        packed = partial(_varlen, documents=look.documents, window=window, scale=scale)
        if look.backend == "deterministic":
            return repeatable(packed, q_BSHD, k_BSGD, v_BSGD)
        return packed(q_BSHD, k_BSGD, v_BSGD)
    mask = None if look.masks is None else look.masks[window]
    if mask is None and window is not None and q_BSHD.shape[1] > window:
        mask = window_mask(q_BSHD.shape[1], window, q_BSHD.device)
    if mask is not None and look.backend in BACKENDS:
        raise _refused(look.backend, "packed rows, or rows longer than the window, take a mask here")
    run = partial(_whole_rows, mask=mask, scale=scale)
    if look.backend == "deterministic":
        return _again(run, mask, (q_BSHD, k_BSGD, v_BSGD))
    try:
        with _kernel(look.backend):
            return run(q_BSHD, k_BSGD, v_BSGD)
    except RuntimeError as error:
        if look.backend not in BACKENDS or not _no_kernel(error):
            raise
        what = f"queries {list(q_BSHD.shape)} and keys {list(k_BSGD.shape)} in {q_BSHD.dtype} are not for it"
        raise _refused(look.backend, what) from None


def _whole_rows(q_BSHD: Tensor, k_BSGD: Tensor, v_BSGD: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    out_BHSD = functional.scaled_dot_product_attention(
        q_BSHD.transpose(1, 2), k_BSGD.transpose(1, 2), v_BSGD.transpose(1, 2), attn_mask=mask, is_causal=mask is None,
        scale=scale, enable_gqa=q_BSHD.shape[2] != k_BSGD.shape[2],
    )  # fmt: skip
    return out_BHSD.transpose(1, 2)


def _again(run: Callable[..., Tensor], mask: Tensor | None, tensors: tuple[Tensor, ...]) -> Tensor:
    """Attention that gives the same bits again: flash's or the efficient kernel's deterministic backward, which take no mask
    here; else plain products, which always do."""
    if mask is None:
        try:
            with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]):
                return repeatable(run, *tensors)
        except RuntimeError as error:
            if not _no_kernel(error):
                raise
    with sdpa_kernel(SDPBackend.MATH):
        return run(*tensors)


def _no_kernel(error: RuntimeError) -> bool:
    return any(words in str(error) for words in NO_KERNEL)


def _refused(backend: str, why: str) -> ModelError:
    return ModelError(f"the {backend} kernel of attention cannot run: {why}", "plan.attention", "plan.attention=auto")


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
    return sdpa_kernel(BACKENDS[backend]) if backend in BACKENDS else nullcontext()
