"""The gradient of an embedding: the sum of the gradients of all tokens of an id, one program an id and a part of the width.

Legend: N tokens, V vocabulary, D width.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 512


@triton.jit
def sum_kernel(grad_pointer, ids_pointer, order_pointer, out_pointer, tokens, width, BLOCK: tl.constexpr):
    first = tl.program_id(0)
    own = tl.load(ids_pointer + first)
    before = tl.load(ids_pointer + tl.maximum(first - 1, 0))
    begins = (first == 0) | (before != own)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    total = tl.zeros((BLOCK,), tl.float32)
    place = first
    same = begins
    while same:
        token = tl.load(order_pointer + place)
        total += tl.load(grad_pointer + token * width + columns, mask=inside, other=0.0).to(tl.float32)
        place += 1
        same = place < tokens
        if same:
            same = tl.load(ids_pointer + place) == own
    if begins:
        tl.store(out_pointer + own * width + columns, total.to(out_pointer.dtype.element_ty), mask=inside)


def backward(grad_ND: Tensor, ids_N: Tensor, rows: int, dtype: torch.dtype) -> Tensor:
    """[rows, D] in `dtype`: zero but for the rows that ids name. Sums are in fp32, in the order of the tokens."""
    sorted_N, order_N = torch.sort(ids_N, stable=True)
    return backward_sorted(grad_ND, sorted_N, order_N, rows, dtype)


def backward_sorted(grad_ND: Tensor, sorted_N: Tensor, order_N: Tensor, rows: int, dtype: torch.dtype) -> Tensor:
    """The same for tokens that are sorted by id: `sorted_N` the ids, `order_N` each one's row of `grad_ND`."""
    tokens, width = len(sorted_N), grad_ND.shape[1]
    out_VD = torch.zeros(rows, width, dtype=dtype, device=grad_ND.device)
    if tokens:
        grid = (tokens, triton.cdiv(width, BLOCK))
        sum_kernel[grid](grad_ND, sorted_N, order_N, out_VD, tokens, width, BLOCK=BLOCK, num_warps=4)
    return out_VD
