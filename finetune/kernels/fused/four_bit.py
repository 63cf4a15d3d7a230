"""Weights in 4 bits, decoded in one pass: bitsandbytes' blocks of codes with scales of 8 bits (or fp32), the same values.

A byte holds two codes, the first in its high half. Value = table[code] x scale of its block, where a doubly quantised
scale is table2[byte] x scale2 of its group + offset.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BYTES = 2048


@triton.jit
def decode_kernel(
    packed_pointer, table_pointer, scales_pointer, table2_pointer, scales2_pointer, offset_pointer, out_pointer, count,
    block, group, NESTED: tl.constexpr, BYTES: tl.constexpr,
):  # fmt: skip
    places = tl.program_id(0).to(tl.int64) * BYTES + tl.arange(0, BYTES)
    inside = places < count
    packed = tl.load(packed_pointer + places, mask=inside, other=0).to(tl.int32)
    own = places * 2 // block
    if NESTED:
        code = tl.load(scales_pointer + own, mask=inside, other=0).to(tl.int32)
        coarse = tl.load(scales2_pointer + own // group, mask=inside, other=0.0)
        # A rounded product and a rounded sum, as two kernels of the library make them: no fused multiply-add.
        scale = tl.load(table2_pointer + code).to(tl.float32)
        scale = _rounded_product(scale, coarse) + tl.load(offset_pointer)
    else:
        scale = tl.load(scales_pointer + own, mask=inside, other=0.0)
    first = tl.load(table_pointer + (packed >> 4)) * scale
    second = tl.load(table_pointer + (packed & 15)) * scale
    both = tl.interleave(first, second)
    wide = tl.program_id(0).to(tl.int64) * BYTES * 2 + tl.arange(0, BYTES * 2)
    tl.store(out_pointer + wide, both.to(out_pointer.dtype.element_ty), mask=wide < count * 2)


@triton.jit
def _rounded_product(left, right):
    return tl.inline_asm_elementwise("mul.rn.f32 $0, $1, $2;", "=f,f,f", [left, right], tl.float32, True, 1)


def decode(
    packed: Tensor, table: Tensor, scales: Tensor, nested: tuple[Tensor, Tensor, Tensor, int] | None, block: int,
    out: Tensor,
) -> Tensor:  # fmt: skip
    """Writes the values to `out` (contiguous, twice as many as bytes). `nested`: (table2, scales2, offset, group)."""
    count = packed.numel()
    table2, scales2, offset, group = nested if nested is not None else (table, scales, table, 1)
    decode_kernel[(triton.cdiv(count, BYTES),)](
        packed, table, scales, table2, scales2, offset, out, count, block, group, NESTED=nested is not None,
        BYTES=BYTES, num_warps=8,
    )  # fmt: skip
    return out


def decoded(packed: Tensor, state: Any, dtype: torch.dtype) -> Tensor:
    """The weight [out, in] of bitsandbytes' packed bytes and quantisation state."""
    out = torch.empty(state.shape, dtype=dtype, device=packed.device)
    nested = None
    if state.nested:
        second = state.state2
        nested = (second.code, second.absmax, state.offset, second.blocksize)
    return decode(packed, state.code, state.absmax, nested, state.blocksize, out)
