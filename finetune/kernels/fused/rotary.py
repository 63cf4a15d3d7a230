"""Rotary positions on queries or keys, also in place: one program a token, all heads.

Legend: B rows, S positions, H heads, P pairs of features (half a head's width).
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def rotate_kernel(
    x_pointer, out_pointer, cos_pointer, sin_pointer, length, row_stride, token_stride, head_stride, table_row,
    table_token, heads, pairs, sign, HEADS: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    row, place = (token // length).to(tl.int64), (token % length).to(tl.int64)
    pair = tl.arange(0, PAIRS)
    inside = pair < pairs
    table = row * table_row + place * table_token + pair
    cos = tl.load(cos_pointer + table, mask=inside, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(sin_pointer + table, mask=inside, other=0.0).to(tl.float32)[None, :] * sign
    head = tl.arange(0, HEADS)
    both = (head < heads)[:, None] & inside[None, :]
    at = x_pointer + row * row_stride + place * token_stride + head[:, None] * head_stride + pair[None, :]
    first = tl.load(at, mask=both, other=0.0)
    second = tl.load(at + pairs, mask=both, other=0.0)
    wide, high = first.to(tl.float32), second.to(tl.float32)
    out = out_pointer + (token.to(tl.int64) * heads + head[:, None]) * (2 * pairs) + pair[None, :]
    tl.store(out, (wide * cos - high * sin).to(first.dtype), mask=both)
    tl.store(out + pairs, (high * cos + wide * sin).to(first.dtype), mask=both)


def rotate(x_BSHD: Tensor, out_BSHD: Tensor, cos_BSD: Tensor, sin_BSD: Tensor, sign: float) -> None:
    """Writes every head turned by the table's angles (sign 1), or back (sign -1). `out` is contiguous and may be x."""
    rows, length, heads, width = x_BSHD.shape
    rotate_kernel[(rows * length,)](
        x_BSHD, out_BSHD, cos_BSD, sin_BSD, length, x_BSHD.stride(0), x_BSHD.stride(1), x_BSHD.stride(2),
        0 if cos_BSD.shape[0] == 1 else cos_BSD.stride(0), cos_BSD.stride(1), heads, width // 2, sign,
        HEADS=triton.next_power_of_2(heads), PAIRS=triton.next_power_of_2(width // 2), num_warps=4,
    )  # fmt: skip
