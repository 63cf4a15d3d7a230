"""The two passes of a cross-entropy over a chunk of the vocabulary, one program a row.

Legend: N positions, C words of a chunk.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096


@triton.jit
def absorb_kernel(logits_pointer, labels_pointer, largest_pointer, total_pointer, wanted_pointer, stride, words, start,
                  BLOCK: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    begin = logits_pointer + row * stride
    columns = tl.arange(0, BLOCK)
    before = tl.load(largest_pointer + row)
    top = before
    for first in range(0, words, BLOCK):
        inside = first + columns < words
        logits = tl.load(begin + first + columns, mask=inside, other=float("-inf")).to(tl.float32)
        top = tl.maximum(top, tl.max(logits, 0))
    added = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, words, BLOCK):
        inside = first + columns < words
        logits = tl.load(begin + first + columns, mask=inside, other=float("-inf")).to(tl.float32)
        added += tl.exp(logits - top)
    total = tl.load(total_pointer + row) * tl.exp(before - top) + tl.sum(added, 0)
    tl.store(largest_pointer + row, top)
    tl.store(total_pointer + row, total)
    local = tl.load(labels_pointer + row) - start
    if (local >= 0) & (local < words):
        tl.store(wanted_pointer + row, tl.load(begin + local).to(tl.float32))


@triton.jit
def slope_kernel(logits_pointer, labels_pointer, largest_pointer, total_pointer, stride, words, start,
                 BLOCK: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    begin = logits_pointer + row * stride
    columns = tl.arange(0, BLOCK)
    top = tl.load(largest_pointer + row)
    whole = tl.load(total_pointer + row)
    local = tl.load(labels_pointer + row) - start
    for first in range(0, words, BLOCK):
        inside = first + columns < words
        logits = tl.load(begin + first + columns, mask=inside, other=float("-inf"))
        share = tl.exp(logits.to(tl.float32) - top) / whole
        share = tl.where(first + columns == local, share - 1.0, share)
        tl.store(begin + first + columns, share.to(logits.dtype), mask=inside)


def absorb(
    logits_NC: Tensor, labels_N: Tensor, start: int, largest_N: Tensor, total_N: Tensor, wanted_N: Tensor
) -> None:
    """Adds a chunk's logits to the running largest, sum and label's logit, all fp32 [N], in place."""
    if len(labels_N):
        absorb_kernel[(len(labels_N),)](
            logits_NC, labels_N, largest_N, total_N, wanted_N, logits_NC.stride(0), logits_NC.shape[1], start,
            BLOCK=BLOCK, num_warps=8,
        )  # fmt: skip


def slope_(logits_NC: Tensor, labels_N: Tensor, start: int, largest_N: Tensor, total_N: Tensor) -> None:
    """Overwrites a chunk's logits with softmax less one at the label."""
    if len(labels_N):
        slope_kernel[(len(labels_N),)](
            logits_NC, labels_N, largest_N, total_N, logits_NC.stride(0), logits_NC.shape[1], start,
            BLOCK=BLOCK, num_warps=8,
        )  # fmt: skip
