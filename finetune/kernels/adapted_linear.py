"""Linears that share one input, each with an optional LoRA, as one differentiable operation with little kept.

A frozen weight needs nothing for its backward; the adapters need the shared input once, and the R-wide products of it.
So q, k and v (or gate and up) keep one input in place of six. A frozen weight is asked for when it is used, in forward
and again in backward, so that one stored in 4 or 8 bits is never kept decoded. Adapter weights are fp32; products run in
the compute dtype, their gradients leave the matrix product in fp32.

The plain functions `run` and `back` are the operation; `adapted_linears` makes autograd call them, and a block that
recomputes itself calls them directly.

Legend: N tokens, K inputs, O outputs, R adapter rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from finetune.kernels.keyed_dropout import apply_mask


@dataclass(frozen=True)
class Draws:
    """Keyed dropout of an adapter's input: one key a row (int64 [B]) and the share dropped."""

    keys_B: Tensor
    dropped: float


@dataclass(frozen=True)
class Leaf:
    """One linear: `frozen` gives its weight [O, K] in the compute dtype, or `weight` is its trained parameter.

    `a_RK` and `b_OR` are the adapter's factors (None: no adapter), their product times `scale`.
    """

    frozen: Callable[[], Tensor] | None = None
    weight: Tensor | None = None
    bias: Tensor | None = None
    a_RK: Tensor | None = None
    b_OR: Tensor | None = None
    scale: float = 1.0
    draws: Draws | None = None

    def tensors(self) -> tuple[Tensor | None, ...]:
        """What may have a gradient, in the order of `TENSORS`."""
        return self.weight, self.bias, self.a_RK, self.b_OR

    def matrix(self, dtype: torch.dtype) -> Tensor:
        """The weight [O, K] in the compute dtype."""
        if self.weight is not None:
            return self.weight.to(dtype)
        assert self.frozen is not None
        return self.frozen()


TENSORS = 4
Grads = tuple[Tensor | None, ...]


def adapted_linears_reference(x: Tensor, leaves: Sequence[Leaf]) -> tuple[Tensor, ...]:
    """The same by plain operations: x W^T + bias + scale (drop(x) A^T) B^T for every leaf."""
    outs = []
    for leaf in leaves:
        out = functional.linear(x, leaf.matrix(x.dtype), None if leaf.bias is None else leaf.bias.to(x.dtype))
        if leaf.a_RK is not None and leaf.b_OR is not None:
            read = x if leaf.draws is None else apply_mask(x, leaf.draws.keys_B, leaf.draws.dropped)
            thin = functional.linear(read, leaf.a_RK.to(x.dtype))
            out = out + leaf.scale * functional.linear(thin, leaf.b_OR.to(x.dtype))
        outs.append(out)
    return tuple(outs)


def adapted_linears(x: Tensor, leaves: Sequence[Leaf]) -> tuple[Tensor, ...]:
    """Every leaf's output [..., O] for x [..., K] in the compute dtype. Differentiable once, by x and the leaves' tensors."""
    return _AdaptedLinears.apply(x, tuple(leaves), *(tensor for leaf in leaves for tensor in leaf.tensors()))


def run(x: Tensor, leaves: Sequence[Leaf]) -> tuple[list[Tensor], Tensor | None]:
    """(outputs, the thin products [N, sum of R] that backward wants). To be called without gradients."""
    x_NK = x.reshape(-1, x.shape[-1])
    thin = _thin(x, x_NK, leaves)
    outs, first = [], 0
    for leaf in leaves:
        weight = leaf.matrix(x.dtype)
        # An output that autograd does not see as a view, since what follows works in place.
        out = x.new_empty(*x.shape[:-1], weight.shape[0])
        out_NO = out.view(-1, weight.shape[0])
        if leaf.bias is None:
            torch.mm(x_NK, weight.t(), out=out_NO)
        else:
            torch.addmm(leaf.bias.to(x.dtype), x_NK, weight.t(), out=out_NO)
        if leaf.a_RK is not None and leaf.b_OR is not None and thin is not None:
            rank = leaf.a_RK.shape[0]
            out_NO.addmm_(thin[:, first : first + rank], leaf.b_OR.to(x.dtype).t(), alpha=leaf.scale)
            first += rank
        outs.append(out)
    return outs, thin


def back(
    grads: Sequence[Tensor], x: Tensor | None, thin: Tensor | None, leaves: Sequence[Leaf], need: Sequence[bool]
) -> tuple[Tensor | None, Grads]:
    """(x's gradient, the leaves' tensors' gradients) from the outputs' gradients.

    `need[0]` is x's, then TENSORS a leaf. `x` may be None where no tensor's gradient reads it (frozen, no adapter).
    """
    shape, dtype = grads[0].shape[:-1], grads[0].dtype
    grads_NO = [grad.reshape(-1, grad.shape[-1]) for grad in grads]
    x_NK = None if x is None else x.reshape(-1, x.shape[-1])
    dx_NK: Tensor | None = None
    found: list[Tensor | None] = []
    slopes: list[Tensor] = []
    first = 0
    for number, (grad_NO, leaf) in enumerate(zip(grads_NO, leaves, strict=True)):
        wanted = need[1 + number * TENSORS : 1 + (number + 1) * TENSORS]
        own: list[Tensor | None] = [None] * TENSORS
        if wanted[0] and leaf.weight is not None and x_NK is not None:
            own[0] = product(grad_NO.t(), x_NK, leaf.weight.dtype)
        if wanted[1] and leaf.bias is not None:
            own[1] = grad_NO.sum(0, dtype=torch.promote_types(leaf.bias.dtype, torch.float32)).to(leaf.bias.dtype)
        if need[0]:
            dx_NK = _add_product(dx_NK, grad_NO, leaf.matrix(dtype))
        if leaf.a_RK is not None and leaf.b_OR is not None and thin is not None and x is not None and x_NK is not None:
            rank = leaf.a_RK.shape[0]
            thin_NR = thin[:, first : first + rank]
            first += rank
            if wanted[3]:
                own[3] = product(grad_NO.t(), thin_NR, leaf.b_OR.dtype).mul_(leaf.scale)
            slope_NR = (grad_NO @ leaf.b_OR.to(dtype)).mul_(leaf.scale)
            if leaf.draws is None:
                slopes.append(slope_NR)
            else:
                read_NK = apply_mask(x, leaf.draws.keys_B, leaf.draws.dropped).view(x_NK.shape)
                own[2] = product(slope_NR.t(), read_NK, leaf.a_RK.dtype) if wanted[2] else None
                del read_NK
                if need[0]:
                    back_BSK = (slope_NR @ leaf.a_RK.to(dtype)).view(x.shape)
                    part = apply_mask(back_BSK, leaf.draws.keys_B, leaf.draws.dropped).view(x_NK.shape)
                    dx_NK = part if dx_NK is None else dx_NK.add_(part)
        found += own
    if slopes and x_NK is not None:
        dx_NK = _shared(slopes, x_NK, leaves, need, found, dx_NK)
    return None if dx_NK is None else dx_NK.view(*shape, -1), tuple(found)


def _thin(x: Tensor, x_NK: Tensor, leaves: Sequence[Leaf]) -> Tensor | None:
    """x A^T of every adapter, side by side; adapters without dropout in one product."""
    adapted = [leaf for leaf in leaves if leaf.a_RK is not None]
    if not adapted:
        return None
    if all(leaf.draws is None for leaf in adapted):
        return x_NK @ _stacked(adapted, x.dtype).t()
    parts = []
    for leaf in adapted:
        assert leaf.a_RK is not None
        read = x if leaf.draws is None else apply_mask(x, leaf.draws.keys_B, leaf.draws.dropped)
        parts.append(read.view(x_NK.shape) @ leaf.a_RK.to(x.dtype).t())
    return torch.cat(parts, 1)


def _stacked(adapted: Sequence[Leaf], dtype: torch.dtype) -> Tensor:
    """The A factors of the leaves, one under the other, in the compute dtype."""
    factors = [leaf.a_RK for leaf in adapted if leaf.a_RK is not None]
    return factors[0].to(dtype) if len(factors) == 1 else torch.cat(factors).to(dtype)


def _shared(
    slopes: list[Tensor],
    x_NK: Tensor,
    leaves: Sequence[Leaf],
    need: Sequence[bool],
    found: list[Tensor | None],
    dx_NK: Tensor | None,
) -> Tensor | None:
    """The A gradients of the adapters without dropout (put into `found`) and their part of x's, a product each."""
    numbers = [i for i, leaf in enumerate(leaves) if leaf.a_RK is not None and leaf.draws is None]
    slope_NR = slopes[0] if len(slopes) == 1 else torch.cat(slopes, 1)
    dtype = leaves[numbers[0]].a_RK.dtype  # type: ignore[union-attr]
    factor_grads = product(slope_NR.t(), x_NK, dtype)
    ranks = [leaves[i].a_RK.shape[0] for i in numbers]  # type: ignore[union-attr]
    for number, grad in zip(numbers, factor_grads.split(ranks), strict=True):
        if need[1 + number * TENSORS + 2]:
            found[number * TENSORS + 2] = grad
    if not need[0]:
        return dx_NK
    return _add_product(dx_NK, slope_NR, _stacked([leaves[i] for i in numbers], x_NK.dtype))


def _add_product(total: Tensor | None, left: Tensor, right: Tensor) -> Tensor:
    return left @ right if total is None else total.addmm_(left, right)


def product(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """left @ right in `dtype`, without rounding to the factors' 16 bits on the way to fp32."""
    if left.dtype == dtype:
        return left @ right
    if left.is_cuda and dtype == torch.float32:
        return torch.mm(left, right, out_dtype=torch.float32)
    return left.to(dtype) @ right.to(dtype)


def with_tensors(leaves: Sequence[Leaf], tensors: Sequence[Tensor | None]) -> list[Leaf]:
    """The leaves with their tensors replaced by these, TENSORS each."""
    return [
        replace(
            leaf,
            weight=tensors[i * TENSORS],
            bias=tensors[i * TENSORS + 1],
            a_RK=tensors[i * TENSORS + 2],
            b_OR=tensors[i * TENSORS + 3],
        )
        for i, leaf in enumerate(leaves)
    ]


def reads_input(leaves: Sequence[Leaf]) -> bool:
    """Whether any gradient of the leaves' own tensors needs the input."""
    return any(leaf.weight is not None or leaf.a_RK is not None for leaf in leaves)


class _AdaptedLinears(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, leaves: tuple[Leaf, ...], *tensors: Tensor | None) -> tuple[Tensor, ...]:
        outs, thin = run(x, leaves)
        ctx.leaves = tuple(with_tensors(leaves, [None] * len(tensors)))
        ctx.save_for_backward(x if reads_input(leaves) else None, thin, *tensors)
        return tuple(outs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, thin, *tensors = ctx.saved_tensors
        need = (ctx.needs_input_grad[0], *ctx.needs_input_grad[2:])
        dx, found = back(grads, x, thin, with_tensors(ctx.leaves, tensors), need)
        return dx, None, *found
