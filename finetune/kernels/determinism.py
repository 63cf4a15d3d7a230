"""Torch's deterministic algorithms for a while: the same bits again from the same input, at some cost.

The switch is one of the process, so it is put back. A step runs under `deterministic`, which warns where torch has no such
algorithm. Attention asks for more: told only to warn, its kernels keep adding up with atomics, in whatever order threads
arrive. So `repeatable` runs it, and nothing else, with torch told to refuse.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


@contextmanager
def deterministic(on: bool, refuse: bool = False) -> Iterator[None]:
    """A block in which torch takes deterministic algorithms where it has them (`on` false: changes nothing). With `refuse`
    torch raises RuntimeError where it has none, and for matrix products unless cuBLAS's workspace is fixed."""
    if not on:
        yield
        return
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    fills = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=not refuse)
    # It would write every new tensor once more, to show reads of memory that was never written.
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        with warnings.catch_warnings():
            # cuBLAS asks for a workspace of fixed size, which only several streams at once would need.
            warnings.filterwarnings("ignore", message=".*CUBLAS_WORKSPACE_CONFIG.*")
            yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.utils.deterministic.fill_uninitialized_memory = fills


def repeatable(function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """function(*tensors), forward and backward with torch told to refuse what does not give the same bits again."""
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return _Repeatable.apply(function, *tensors)
    with deterministic(True, refuse=True):
        return function(*tensors)


class _Repeatable(torch.autograd.Function):
    """A part of the graph with a backward of its own, so that the switch is set for that part alone."""

    @staticmethod
    def forward(ctx: Any, function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        inner = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in tensors]
        with torch.enable_grad(), deterministic(True, refuse=True):
            out = function(*inner)
        ctx.inner, ctx.out = inner, out
        return out.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        wanted = [tensor for tensor in ctx.inner if tensor.requires_grad]
        with deterministic(True, refuse=True):
            found = iter(torch.autograd.grad(ctx.out, wanted, grad))
        gradients = tuple(next(found) if tensor.requires_grad else None for tensor in ctx.inner)
        del ctx.inner, ctx.out
        return None, *gradients
