"""Rotary positions on queries and keys, in place and differentiable; plain and fused.

Features i and i + width / 2 of a head are a pair that turns by the position's angle, as transformers lays them out.

Legend: B rows, S positions, H heads, D width of a head, E = H x D.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def rotary_reference(x_BSHD: Tensor, cos_BSD: Tensor, sin_BSD: Tensor) -> Tensor:
    """x turned by the angles of its positions, by plain operations: x * cos + (-second half, first half) * sin."""
    first, second = x_BSHD.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return (x_BSHD * cos_BSD[:, :, None] + turned * sin_BSD[:, :, None]).to(x_BSHD.dtype)


def rotary_(x_BSE: Tensor, heads: int, cos_BSD: Tensor, sin_BSD: Tensor) -> Tensor:
    """The heads of x turned, in x's own memory (contiguous). The tables have one row, or as many as x, and equal halves."""
    return _Rotary.apply(x_BSE, heads, cos_BSD, sin_BSD)


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BSE: Tensor, heads: int, cos_BSD: Tensor, sin_BSD: Tensor) -> Tensor:
        ctx.save_for_backward(cos_BSD, sin_BSD)
        ctx.heads = heads
        ctx.mark_dirty(x_BSE)
        x_BSHD = x_BSE.view(*x_BSE.shape[:2], heads, -1)
        _turn(x_BSHD, x_BSHD, cos_BSD, sin_BSD, 1.0)
        return x_BSE

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BSE: Tensor) -> tuple[Tensor, None, None, None]:
        cos_BSD, sin_BSD = ctx.saved_tensors
        grad_BSHD = grad_BSE.view(*grad_BSE.shape[:2], ctx.heads, -1)
        out_BSHD = torch.empty_like(grad_BSHD, memory_format=torch.contiguous_format)
        _turn(grad_BSHD, out_BSHD, cos_BSD, sin_BSD, -1.0)
        return out_BSHD.view(grad_BSE.shape), None, None, None


def _turn(x_BSHD: Tensor, out_BSHD: Tensor, cos_BSD: Tensor, sin_BSD: Tensor, sign: float) -> None:
    if x_BSHD.is_cuda and x_BSHD.stride(-1) == 1:
        from finetune.kernels.fused import rotary as fused

        fused.rotate(x_BSHD, out_BSHD, cos_BSD, sin_BSD, sign)
        return
    half = x_BSHD.shape[-1] // 2
    cos, sin = cos_BSD[:, :, None, :half], sin_BSD[:, :, None, :half] * sign
    first, second = x_BSHD[..., :half].clone(), x_BSHD[..., half:].clone()
    out_BSHD[..., :half] = first * cos - second * sin
    out_BSHD[..., half:] = second * cos + first * sin
