"""Keyed dropout in one pass: the hash of kernels/keyed_dropout in 32-bit registers, the same bits element by element.

Legend: B rows, S positions, F features.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048


@triton.jit
def mix(word):
    """kernels/keyed_dropout's `mix`."""
    word = word ^ (word >> 16)
    word = word * 0x4BDC9AA5
    word = word ^ (word >> 15)
    word = word * 0x2729B469
    return word ^ (word >> 16)


@triton.jit
def spread(counter):
    """kernels/keyed_dropout's `_spread_`, for counters below 2**32."""
    return mix(counter + 0x9E3779B9)


@triton.jit
def dropout_kernel(
    x_pointer, keys_pointer, out_pointer, length, first_position, features, limit, scale, BLOCK: tl.constexpr
):
    place = tl.program_id(0)
    row, position = place // length, place % length + first_position
    key = tl.load(keys_pointer + row).to(tl.uint32)
    seen = mix(key ^ spread(position.to(tl.uint32)))
    start = place.to(tl.int64) * features
    for first in range(0, features, BLOCK):
        feature = first + tl.arange(0, BLOCK)
        inside = feature < features
        word = mix(seen ^ spread(feature.to(tl.uint32)))
        x = tl.load(x_pointer + start + feature, mask=inside, other=0.0)
        kept = tl.where(word.to(tl.int64) >= limit, x.to(tl.float32) * scale, 0.0)
        tl.store(out_pointer + start + feature, kept.to(x.dtype), mask=inside)


def apply_mask(x_BSF: Tensor, keys_B: Tensor, dropped: float, first: int = 0) -> Tensor:
    """x times mask over (1 - dropped), for contiguous x of at most 32 bits a number, whose rows begin at position `first`."""
    rows, length, features = x_BSF.shape
    out_BSF = torch.empty_like(x_BSF)
    dropout_kernel[(rows * length,)](
        x_BSF,
        keys_B,
        out_BSF,
        length,
        first,
        features,
        round(dropped * 2**32),
        1.0 / (1.0 - dropped),
        BLOCK=BLOCK,
        num_warps=4,
    )
    return out_BSF
