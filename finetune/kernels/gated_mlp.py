"""A LLaMA MLP, down(silu(gate(x)) * up(x)), as one differentiable operation, adapters included.

It keeps its input, the gate's and the up projection's outputs, and the adapters' thin products; the product of gate and
up is made again in backward, in place. `run` and `back` are the operation without autograd: a block that recomputes
itself needs the first half only, since no gradient depends on the down projection's output.

Legend: N tokens, D hidden width, I intermediate width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from finetune.kernels import adapted_linear
from finetune.kernels.adapted_linear import TENSORS, Grads, Leaf, with_tensors
from finetune.kernels.swiglu import swiglu, swiglu_backward_


@dataclass(frozen=True)
class MlpLeaves:
    """The three linears."""

    gate: Leaf
    up: Leaf
    down: Leaf

    def all(self) -> tuple[Leaf, Leaf, Leaf]:
        return self.gate, self.up, self.down

    def tensors(self) -> tuple[Tensor | None, ...]:
        return tuple(tensor for leaf in self.all() for tensor in leaf.tensors())

    def tile(self, start: int, length: int) -> MlpLeaves:
        """The linears for tokens from `start` on of rows of `length` tokens."""
        return MlpLeaves(*(leaf.tile(start, length) for leaf in self.all()))


@dataclass(frozen=True)
class Half:
    """What backward wants of forward: outputs of gate and up, and the adapters' thin products.

    `last` is that of the down adapter, or None to make it again.
    """

    gate: Tensor
    up: Tensor
    thin: Tensor | None
    last: Tensor | None = None


def gated_mlp(x: Tensor, leaves: MlpLeaves) -> Tensor:
    """The MLP's output for x [..., D]. Differentiable once, by x and the leaves' tensors."""
    return _GatedMlp.apply(x, leaves, *leaves.tensors())


def first_half(x: Tensor, leaves: MlpLeaves) -> Half:
    """Gate and up, without autograd."""
    (gate, up), thin = adapted_linear.run(x, (leaves.gate, leaves.up))
    return Half(gate, up, thin)


def second_half(half: Half, leaves: MlpLeaves) -> tuple[Tensor, Tensor | None]:
    """(the output, the down adapter's thin product), without autograd."""
    (out,), thin = adapted_linear.run(swiglu(half.gate, half.up), (leaves.down,))
    return out, thin


def back(
    grad: Tensor, x: Tensor | None, half: Half, leaves: MlpLeaves, need: Sequence[bool], into: Grads | None = None
) -> tuple[Tensor | None, Grads]:
    """(x's gradient, the tensors' gradients) from the output's. Overwrites `half`.

    `need[0]` is x's, then TENSORS a leaf. `into` are gradients of other tokens, which take these in and are returned.
    """
    early, late = (None, None) if into is None else (into[: 2 * TENSORS], into[2 * TENSORS :])
    grad = grad.contiguous()
    shape, dtype = grad.shape[:-1], grad.dtype
    grad_ND = grad.reshape(-1, grad.shape[-1])
    down = leaves.down
    inner_NI = grad_ND @ down.matrix(dtype)
    adapter = down.adapter
    if adapter is not None:
        slope_NR = (grad_ND @ adapter.b.to(dtype)).mul_(adapter.scale)
        if adapter.draws is None:
            inner_NI.addmm_(slope_NR, adapter.a.to(dtype))
        else:
            part = (slope_NR @ adapter.a.to(dtype)).view(*shape, -1)
            inner_NI.add_(adapter.draws.apply(part).view(inner_NI.shape))
    hidden, gate_grad, up_grad = swiglu_backward_(inner_NI.view(*shape, -1), half.gate, half.up)
    down_need = need[1 + 2 * TENSORS :]
    down_grads: Grads = (None,) * TENSORS
    thin = half.last
    if any(down_need):
        thin = adapted_linear.thin_products(hidden, (down,)) if thin is None else thin
        _, down_grads = adapted_linear.back([grad], hidden, thin, (down,), (False, *down_need), late)
    del hidden, inner_NI
    dx, others = adapted_linear.back(
        [gate_grad, up_grad], x, half.thin, (leaves.gate, leaves.up), need[: 1 + 2 * TENSORS], early
    )
    return dx, (*others, *down_grads)


class _GatedMlp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, leaves: MlpLeaves, *tensors: Tensor | None) -> Tensor:
        half = first_half(x, leaves)
        out, thin = second_half(half, leaves)
        ctx.leaves = MlpLeaves(*with_tensors(leaves.all(), [None] * len(tensors)))
        keeps = adapted_linear.reads_input((leaves.gate, leaves.up))
        ctx.save_for_backward(x if keeps else None, half.gate, half.up, half.thin, thin, *tensors)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, gate, up, thin_gu, thin, *tensors = ctx.saved_tensors
        need = (ctx.needs_input_grad[0], *ctx.needs_input_grad[2:])
        leaves = MlpLeaves(*with_tensors(ctx.leaves.all(), tensors))
        dx, found = back(grad, x, Half(gate, up, thin_gu, thin), leaves, need)
        return dx, None, *found
