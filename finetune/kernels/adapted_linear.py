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

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from finetune.kernels.keyed_dropout import apply_mask


@dataclass(frozen=True)
class Draws:
    """Keyed dropout of an adapter's input: one key a row (int64 [B]) and the share dropped.

    With `length`, the input is a tile: tokens from `start` on of all rows of `length` tokens, one row after the other.
    """

    keys: Tensor
    dropped: float
    start: int = 0
    length: int = 0

    def apply(self, x: Tensor) -> Tensor:
        """x [B, S, K] (or a tile [1, N, K]) with this mask; it is its own transpose, so backward calls it on a gradient."""
        if not self.length:
            return apply_mask(x, self.keys, self.dropped)
        x_NK = x.reshape(-1, x.shape[-1])
        parts = [
            apply_mask(
                x_NK[at : at + count * long].view(count, long, -1), self.keys[row : row + count], self.dropped, first
            )
            for at, row, count, first, long in _spans(self.start, len(x_NK), self.length)
        ]
        return (
            torch.cat([part.flatten(0, 1) for part in parts]).view(x.shape)
            if len(parts) > 1
            else parts[0].view(x.shape)
        )


@dataclass(frozen=True)
class Adapter:
    """A LoRA: `a` [R, K] and `b` [O, R], fp32, whose product acts times `scale`."""

    a: Tensor
    b: Tensor
    scale: float = 1.0
    draws: Draws | None = None

    @property
    def rank(self) -> int:
        return self.a.shape[0]


@dataclass(frozen=True)
class Leaf:
    """One linear: `frozen` gives its weight [O, K] in the compute dtype, or `weight` is its trained parameter."""

    frozen: Callable[[], Tensor] | None = None
    weight: Tensor | None = None
    bias: Tensor | None = None
    adapter: Adapter | None = None

    def tensors(self) -> tuple[Tensor | None, ...]:
        """What may have a gradient: weight, bias, a, b (TENSORS of them)."""
        adapter = (None, None) if self.adapter is None else (self.adapter.a, self.adapter.b)
        return self.weight, self.bias, *adapter

    def tile(self, start: int, length: int) -> Leaf:
        """The linear for tokens from `start` on of rows of `length` tokens: dropout draws by a token's place in its row."""
        if self.adapter is None or self.adapter.draws is None:
            return self
        return replace(
            self, adapter=replace(self.adapter, draws=replace(self.adapter.draws, start=start, length=length))
        )

    def matrix(self, dtype: torch.dtype) -> Tensor:
        """The weight [O, K] in the compute dtype."""
        if self.weight is not None:
            return self.weight.to(dtype)
        assert self.frozen is not None
        return self.frozen()


TENSORS = 4
Grads = tuple[Tensor | None, ...]


def _spans(start: int, tokens: int, length: int) -> Iterator[tuple[int, int, int, int, int]]:
    """The rows of a tile: (where in the tile, first row, rows, first position, positions), whole rows together."""
    at = 0
    while at < tokens:
        row, first = divmod(start + at, length)
        whole = (tokens - at) // length if first == 0 else 0
        count, long = (whole, length) if whole else (1, min(length - first, tokens - at))
        yield at, row, count, first, long
        at += count * long


def adapted_linears_reference(x: Tensor, leaves: Sequence[Leaf]) -> tuple[Tensor, ...]:
    """The same by plain operations: x W^T + bias + scale (drop(x) A^T) B^T for every leaf."""
    outs = []
    for leaf in leaves:
        out = functional.linear(x, leaf.matrix(x.dtype), None if leaf.bias is None else leaf.bias.to(x.dtype))
        adapter = leaf.adapter
        if adapter is not None:
            thin = functional.linear(_read(x, adapter), adapter.a.to(x.dtype))
            out = out + adapter.scale * functional.linear(thin, adapter.b.to(x.dtype))
        outs.append(out)
    return tuple(outs)


def adapted_linears(x: Tensor, leaves: Sequence[Leaf]) -> tuple[Tensor, ...]:
    """Every leaf's output [..., O] for x [..., K] in the compute dtype. Differentiable once, by x and the leaves' tensors."""
    return _AdaptedLinears.apply(x, tuple(leaves), *(tensor for leaf in leaves for tensor in leaf.tensors()))


def run(x: Tensor, leaves: Sequence[Leaf]) -> tuple[list[Tensor], Tensor | None]:
    """(outputs, the thin products [N, sum of R] that backward wants). To be called without gradients."""
    x_NK = x.reshape(-1, x.shape[-1])
    thin = thin_products(x, leaves)
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
        if leaf.adapter is not None and thin is not None:
            last = first + leaf.adapter.rank
            out_NO.addmm_(thin[:, first:last], leaf.adapter.b.to(x.dtype).t(), alpha=leaf.adapter.scale)
            first = last
        outs.append(out)
    return outs, thin


def back(
    grads: Sequence[Tensor],
    x: Tensor | None,
    thin: Tensor | None,
    leaves: Sequence[Leaf],
    need: Sequence[bool],
    into: Grads | None = None,
) -> tuple[Tensor | None, Grads]:
    """(x's gradient, the leaves' tensors' gradients) from the outputs' gradients.

    `need[0]` is x's, then TENSORS a leaf. `x` may be None where no tensor's gradient reads it (frozen, no adapter). `into`
    are gradients of other tokens, which take these in (each sum in the tensor's own precision) and are returned.
    """
    shape, dtype = grads[0].shape[:-1], grads[0].dtype
    x_NK = None if x is None else x.reshape(-1, x.shape[-1])
    dx_NK: Tensor | None = None
    found: list[Tensor | None] = []
    slopes: list[tuple[int, Tensor]] = []
    first = 0
    for number, (grad, leaf) in enumerate(zip(grads, leaves, strict=True)):
        grad_NO = grad.reshape(-1, grad.shape[-1])
        wanted = need[1 + number * TENSORS : 1 + (number + 1) * TENSORS]
        own: list[Tensor | None] = [None] * TENSORS
        if wanted[0] and leaf.weight is not None and x_NK is not None:
            total = None if into is None else into[number * TENSORS]
            own[0] = _added(total, grad_NO.t(), x_NK, leaf.weight.dtype)
        if wanted[1] and leaf.bias is not None:
            own[1] = grad_NO.sum(0, dtype=torch.promote_types(leaf.bias.dtype, torch.float32)).to(leaf.bias.dtype)
        if need[0]:
            dx_NK = _add_product(dx_NK, grad_NO, leaf.matrix(dtype))
        adapter = leaf.adapter
        if adapter is not None and thin is not None and x is not None:
            thin_NR = thin[:, first : first + adapter.rank]
            first += adapter.rank
            if wanted[3]:
                own[3] = product(grad_NO.t(), thin_NR, adapter.b.dtype).mul_(adapter.scale)
            slope_NR = (grad_NO @ adapter.b.to(dtype)).mul_(adapter.scale)
            if adapter.draws is None:
                slopes.append((number, slope_NR))
            else:
                own[2], dx_NK = _dropped(slope_NR, x, adapter, dx_NK, (wanted[2], need[0]))
        found += own
    if slopes and x_NK is not None:
        dx_NK = _shared(slopes, x_NK, leaves, need[0], found, dx_NK)
    if into is not None:
        found = [_taken_in(total, part) for total, part in zip(into, found, strict=True)]
    return None if dx_NK is None else dx_NK.view(*shape, -1), tuple(found)


def _added(total: Tensor | None, left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """total + left @ right in `dtype`, in place. In the factors' own type no second matrix stands, and is rounded once."""
    if total is None:
        return product(left, right, dtype)
    return total.addmm_(left, right) if left.dtype == dtype else total.add_(product(left, right, dtype))


def _taken_in(total: Tensor | None, part: Tensor | None) -> Tensor | None:
    if total is None or part is None or part is total:
        return part
    return total.add_(part)


def thin_products(x: Tensor, leaves: Sequence[Leaf]) -> Tensor | None:
    """drop(x) a^T of every adapter, side by side [N, sum of R]; adapters without dropout in one product."""
    adapters = [leaf.adapter for leaf in leaves if leaf.adapter is not None]
    if not adapters:
        return None
    x_NK = x.reshape(-1, x.shape[-1])
    if all(adapter.draws is None for adapter in adapters):
        return x_NK @ _stacked(adapters, x.dtype).t()
    parts = [_read(x, adapter).view(x_NK.shape) @ adapter.a.to(x.dtype).t() for adapter in adapters]
    return torch.cat(parts, 1)


def _read(x: Tensor, adapter: Adapter) -> Tensor:
    return x if adapter.draws is None else adapter.draws.apply(x)


def _stacked(adapters: Sequence[Adapter], dtype: torch.dtype) -> Tensor:
    """The first factors, one under the other, in the compute dtype."""
    return adapters[0].a.to(dtype) if len(adapters) == 1 else torch.cat([adapter.a for adapter in adapters]).to(dtype)


def _dropped(
    slope_NR: Tensor, x: Tensor, adapter: Adapter, dx_NK: Tensor | None, need: tuple[bool, bool]
) -> tuple[Tensor | None, Tensor | None]:
    """(a's gradient, x's with this adapter's part) of an adapter with dropout, whose mask is made again."""
    assert adapter.draws is not None
    factor = None
    if need[0]:
        factor = product(slope_NR.t(), adapter.draws.apply(x).view(-1, x.shape[-1]), adapter.a.dtype)
    if not need[1]:
        return factor, dx_NK
    part_NK = adapter.draws.apply((slope_NR @ adapter.a.to(x.dtype)).view(x.shape)).view(-1, x.shape[-1])
    return factor, part_NK if dx_NK is None else dx_NK.add_(part_NK)


def _shared(
    slopes: list[tuple[int, Tensor]],
    x_NK: Tensor,
    leaves: Sequence[Leaf],
    need_x: bool,
    found: list[Tensor | None],
    dx_NK: Tensor | None,
) -> Tensor | None:
    """Gradients of the first factors of adapters without dropout (put into `found`) and their part of x's, a product each."""
    adapters = [leaves[number].adapter for number, _ in slopes]
    known = [adapter for adapter in adapters if adapter is not None]
    slope_NR = slopes[0][1] if len(slopes) == 1 else torch.cat([slope for _, slope in slopes], 1)
    factors = product(slope_NR.t(), x_NK, known[0].a.dtype).split([adapter.rank for adapter in known])
    for (number, _), factor in zip(slopes, factors, strict=True):
        found[number * TENSORS + 2] = factor
    return _add_product(dx_NK, slope_NR, _stacked(known, x_NK.dtype)) if need_x else dx_NK


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
    """The leaves with their tensors replaced by these, TENSORS each; None in the place of an adapter's keeps its own."""
    filled = []
    for number, leaf in enumerate(leaves):
        weight, bias, a, b = tensors[number * TENSORS : (number + 1) * TENSORS]
        adapter = leaf.adapter
        if adapter is not None and a is not None and b is not None:
            adapter = replace(adapter, a=a, b=b)
        filled.append(replace(leaf, weight=weight, bias=bias, adapter=adapter))
    return filled


def reads_input(leaves: Sequence[Leaf]) -> bool:
    """Whether any gradient of the leaves' own tensors needs the input."""
    return any(leaf.weight is not None or leaf.adapter is not None for leaf in leaves)


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
