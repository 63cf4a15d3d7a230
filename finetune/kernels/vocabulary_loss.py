"""Cross-entropy over a vocabulary that comes in chunks: sums that each chunk adds to, then the slope of each chunk.

A softmax needs the largest logit and the sum of all before any of its values is known. When the head's rows come one chunk
at a time, the chunks pass twice: `absorb` keeps a running largest, sum and the label's logit for each position; `slope_`
then turns a chunk's logits into the loss's derivative by them. Logits are in the compute dtype, the sums in fp32. On a
GPU each is one kernel (fused/vocabulary_loss).

Source of the running sum: Milakov and Gimelshein 2018 (arXiv 1805.02867).
Legend: N positions, C words of a chunk.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sums:
    """fp32 [N] each: the largest logit so far, the sum of exp(logit - largest), and the label's own logit."""

    largest: Tensor
    total: Tensor
    wanted: Tensor

    @staticmethod
    def empty(positions: int, device: torch.device) -> Sums:
        return Sums(
            torch.full((positions,), float("-inf"), device=device),
            torch.zeros(positions, device=device),
            torch.zeros(positions, device=device),
        )

    def part(self, rows: slice) -> Sums:
        """Those of some positions, as views."""
        return Sums(self.largest[rows], self.total[rows], self.wanted[rows])

    def losses(self) -> Tensor:
        """The cross-entropy of each position [N], once every chunk was absorbed."""
        return self.total.log() + self.largest - self.wanted


def absorb(logits_NC: Tensor, labels_N: Tensor, start: int, sums: Sums) -> None:
    """Adds the logits of the words from `start` on to the sums, in place. Labels are int64, each inside the vocabulary."""
    if logits_NC.is_cuda:
        from finetune.kernels.fused import vocabulary_loss as fused

        fused.absorb(logits_NC, labels_N, start, sums.largest, sums.total, sums.wanted)
        return
    wide_NC = logits_NC.float()
    higher_N = torch.maximum(sums.largest, wide_NC.amax(1))
    sums.total.mul_((sums.largest - higher_N).exp_()).add_((wide_NC - higher_N[:, None]).exp_().sum(1))
    sums.largest.copy_(higher_N)
    local_N = labels_N - start
    inside_N = (local_N >= 0) & (local_N < logits_NC.shape[1])
    picked_N = wide_NC.gather(1, local_N.clamp(0, logits_NC.shape[1] - 1)[:, None]).squeeze(1)
    sums.wanted.copy_(torch.where(inside_N, picked_N, sums.wanted))


def slope_(logits_NC: Tensor, labels_N: Tensor, start: int, sums: Sums) -> Tensor:
    """Overwrites a chunk's logits with the derivative of the summed loss by them; returns them."""
    if logits_NC.is_cuda:
        from finetune.kernels.fused import vocabulary_loss as fused

        fused.slope_(logits_NC, labels_N, start, sums.largest, sums.total)
        return logits_NC
    share_NC = (logits_NC.float() - sums.largest[:, None]).exp_().div_(sums.total[:, None])
    local_N = labels_N - start
    inside = ((local_N >= 0) & (local_N < logits_NC.shape[1])).nonzero().flatten()
    share_NC[inside, local_N[inside]] -= 1.0
    return logits_NC.copy_(share_NC)
