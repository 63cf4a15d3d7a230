"""Cross-entropy of rows of logits, and in their place the loss's derivative by them: two passes, one program a row.

Legend: C positions, V vocabulary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 8192


@triton.jit
def loss_kernel(logits_pointer, labels_pointer, weights_pointer, losses_pointer, stride, vocabulary,
                WEIGHTS: tl.constexpr, SLOPE: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    start = logits_pointer + row * stride
    label = tl.load(labels_pointer + row)
    columns = tl.arange(0, BLOCK)
    largest = tl.full((BLOCK,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, vocabulary, BLOCK):
        inside = first + columns < vocabulary
        logits = tl.load(start + first + columns, mask=inside, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(largest, logits)
        # A lane that has seen nothing has no sum to rescale: -inf less -inf is no number.
        rescale = tl.where(higher == float("-inf"), 0.0, tl.exp(largest - higher))
        total = total * rescale + tl.where(inside, tl.exp(logits - higher), 0.0)
        largest = higher
    top = tl.max(largest, 0)
    whole = tl.sum(tl.where(largest == float("-inf"), 0.0, total * tl.exp(largest - top)), 0)
    wanted = tl.load(start + label).to(tl.float32)
    weight = 1.0
    if WEIGHTS:
        weight = tl.load(weights_pointer + row).to(tl.float32)
    tl.store(losses_pointer + row, (tl.log(whole) + top - wanted) * weight)
    if SLOPE:
        # Every lane must have read the label's logit before one of them overwrites it.
        tl.debug_barrier()
        for first in range(0, vocabulary, BLOCK):
            inside = first + columns < vocabulary
            logits = tl.load(start + first + columns, mask=inside, other=float("-inf"))
            share = tl.exp(logits.to(tl.float32) - top) / whole
            share = tl.where(first + columns == label, share - 1.0, share)
            tl.store(start + first + columns, (share * weight).to(logits.dtype), mask=inside)


def loss_(logits_CV: Tensor, labels_C: Tensor, weights_C: Tensor | None, slope: bool) -> Tensor:
    """The fp32 losses [C]; overwrites the logits with the derivative of the (weighted) loss by them, if `slope`."""
    losses_C = torch.empty(len(labels_C), dtype=torch.float32, device=logits_CV.device)
    loss_kernel[(len(labels_C),)](
        logits_CV, labels_C, weights_C, losses_C, logits_CV.stride(0), logits_CV.shape[1],
        WEIGHTS=weights_C is not None, SLOPE=slope, BLOCK=BLOCK, num_warps=16,
    )  # fmt: skip
    return losses_C
