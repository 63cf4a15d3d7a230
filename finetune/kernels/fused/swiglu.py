"""The gate of a LLaMA MLP, silu(gate) * up, forward, and backward in place."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048


@triton.jit
def forward_kernel(gate_pointer, up_pointer, out_pointer, count, BLOCK: tl.constexpr):
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = places < count
    gate = tl.load(gate_pointer + places, mask=inside, other=0.0)
    up = tl.load(up_pointer + places, mask=inside, other=0.0).to(tl.float32)
    wide = gate.to(tl.float32)
    active = (wide * tl.sigmoid(wide)).to(gate.dtype).to(tl.float32)
    tl.store(out_pointer + places, (active * up).to(gate.dtype), mask=inside)


@triton.jit
def backward_kernel(grad_pointer, gate_pointer, up_pointer, count, BLOCK: tl.constexpr):
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = places < count
    grad = tl.load(grad_pointer + places, mask=inside, other=0.0).to(tl.float32)
    narrow = tl.load(gate_pointer + places, mask=inside, other=0.0)
    up = tl.load(up_pointer + places, mask=inside, other=0.0).to(tl.float32)
    gate = narrow.to(tl.float32)
    share = tl.sigmoid(gate)
    active = (gate * share).to(narrow.dtype).to(tl.float32)
    tl.store(grad_pointer + places, (active * up).to(narrow.dtype), mask=inside)
    tl.store(up_pointer + places, (grad * active).to(narrow.dtype), mask=inside)
    slope = share * (1.0 + gate * (1.0 - share))
    tl.store(gate_pointer + places, (grad * up * slope).to(narrow.dtype), mask=inside)


def forward(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, for contiguous tensors of one shape and dtype."""
    out = torch.empty_like(gate)
    forward_kernel[(triton.cdiv(gate.numel(), BLOCK),)](gate, up, out, gate.numel(), BLOCK=BLOCK, num_warps=8)
    return out


def backward_(grad: Tensor, gate: Tensor, up: Tensor) -> None:
    """Overwrites grad with silu(gate) * up, gate with its gradient, up with its gradient."""
    backward_kernel[(triton.cdiv(gate.numel(), BLOCK),)](grad, gate, up, gate.numel(), BLOCK=BLOCK, num_warps=8)
