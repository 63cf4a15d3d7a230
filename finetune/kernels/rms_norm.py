"""RMS normalisation as LLaMA-class models define it, alone and after a residual sum; plain and fused.

The normed value is rounded to the input's dtype before the gain, as transformers' classes do. The fused form keeps the
input and one fp32 scale a row for backward, where the plain one keeps two fp32 copies of the input.

Legend: N rows, D features.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def rms_norm_reference(x: Tensor, gain_D: Tensor, epsilon: float, dtype: torch.dtype | None = None) -> Tensor:
    """gain * x / sqrt(mean(x^2) + epsilon) over the last dimension, by plain operations, in `dtype` (default: x's)."""
    wide = x.float() if x.dtype != torch.float64 else x
    normed = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)).to(x.dtype)
    return (gain_D * normed).to(dtype or x.dtype)


def rms_norm(x: Tensor, gain_D: Tensor, epsilon: float, dtype: torch.dtype | None = None) -> Tensor:
    """As the reference. `x` has any number of dimensions before the last; it is differentiable once."""
    _, out = _AddNorm.apply(x, None, gain_D, epsilon, dtype or x.dtype)
    return out


def add_rms_norm(
    x: Tensor, added: Tensor, gain_D: Tensor, epsilon: float, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """The residual sum x + added, in x's dtype, and its norm."""
    return _AddNorm.apply(x, added, gain_D, epsilon, dtype or x.dtype)


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, added: Tensor | None, gain_D: Tensor, epsilon: float, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        shape = x.shape
        x_ND = x.reshape(-1, shape[-1])
        added_ND = None if added is None else added.reshape(-1, shape[-1])
        # Made in x's shape: autograd must not see it as a view, since rotary positions come in place after it.
        out = torch.empty(shape, dtype=dtype, device=x.device)
        summed_ND, scale_N = _forward(x_ND, added_ND, gain_D, epsilon, out.view(x_ND.shape))
        ctx.save_for_backward(summed_ND, gain_D, scale_N)
        ctx.added = None if added is None else added.dtype
        summed = x if added is None else summed_ND.view(shape)
        if added is None:
            ctx.mark_non_differentiable(summed)
        return summed, out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, through: Tensor | None, grad: Tensor) -> tuple[Tensor | None, ...]:
        x_ND, gain_D, scale_N = ctx.saved_tensors
        through_ND = None if through is None or ctx.added is None else through.reshape(x_ND.shape)
        grad_ND = grad.reshape(x_ND.shape)
        dx_ND, gain_grad_D = _backward(x_ND, gain_D, scale_N, grad_ND, through_ND, ctx.needs_input_grad[2])
        dx = dx_ND.view(grad.shape)
        gain_grad = None if gain_grad_D is None else gain_grad_D.to(gain_D.dtype)
        return dx, None if ctx.added is None else dx.to(ctx.added), gain_grad, None, None


def _forward(
    x_ND: Tensor, added_ND: Tensor | None, gain_D: Tensor, epsilon: float, out_ND: Tensor
) -> tuple[Tensor, Tensor]:
    """(the sum, the fp32 scales); the norm is written to `out_ND`."""
    if x_ND.is_cuda:
        from finetune.kernels.fused import rms_norm as fused

        if x_ND.shape[1] <= fused.WIDEST:
            added_ND = None if added_ND is None else added_ND.contiguous()
            return fused.forward(x_ND.contiguous(), added_ND, gain_D, epsilon, out_ND)
    summed_ND = x_ND if added_ND is None else (x_ND + added_ND).to(x_ND.dtype)
    wide_ND = summed_ND if x_ND.dtype == torch.float64 else summed_ND.float()
    scale_N = torch.rsqrt(wide_ND.pow(2).mean(-1) + epsilon)
    normed_ND = (wide_ND * scale_N[:, None]).to(x_ND.dtype)
    out_ND.copy_(gain_D * normed_ND)
    return summed_ND, scale_N


def _backward(
    x_ND: Tensor, gain_D: Tensor, scale_N: Tensor, grad_ND: Tensor, through_ND: Tensor | None, gain_grad: bool
) -> tuple[Tensor, Tensor | None]:
    if x_ND.is_cuda:
        from finetune.kernels.fused import rms_norm as fused

        if x_ND.shape[1] <= fused.WIDEST:
            through_ND = None if through_ND is None else through_ND.contiguous()
            return fused.backward(x_ND, gain_D, scale_N, grad_ND.contiguous(), through_ND, gain_grad)
    wide = torch.float64 if x_ND.dtype == torch.float64 else torch.float32
    normed_ND, slope_ND = x_ND.to(wide) * scale_N[:, None], grad_ND.to(wide)
    gain_grad_D = (slope_ND * normed_ND).sum(0) if gain_grad else None
    slope_ND = slope_ND * gain_D.to(wide)
    dx_ND = scale_N[:, None] * (slope_ND - normed_ND * (slope_ND * normed_ND).mean(-1, keepdim=True))
    if through_ND is not None:
        dx_ND = dx_ND + through_ND.to(wide)
    return dx_ND.to(x_ND.dtype), gain_grad_D
