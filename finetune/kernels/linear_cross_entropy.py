"""The sum of cross-entropies of a linear head, without the whole logits.

A head of V words turns N positions into N x V logits, the largest tensor of a small model's step. Here at most
`chunk` x V of them exist at once: each chunk is projected, its loss taken, and its gradients made on the spot, so that
backward only scales what forward left. Positions that are not trained are dropped before the projection.

The price: gradients are made in forward even if backward never comes (not under no_grad), and a loss per position
cannot be had, because the gradient of a sum is all that is kept.

Legend: N positions, D hidden width, V vocabulary, C positions of one chunk.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from finetune.contracts import IGNORED


def linear_cross_entropy_reference(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    labels_N: Tensor,
    bias_V: Tensor | None = None,
    weights_N: Tensor | None = None,
) -> Tensor:
    """The same sum by plain operations, with the whole logits."""
    logits_NV = functional.linear(hidden_ND, weight_VD, bias_V)
    if logits_NV.dtype != torch.float64:
        logits_NV = logits_NV.float()
    losses_N = functional.cross_entropy(logits_NV, labels_N, ignore_index=IGNORED, reduction="none")
    return (losses_N if weights_N is None else losses_N * weights_N).sum()


def linear_cross_entropy_sum(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    labels_N: Tensor,
    bias_V: Tensor | None = None,
    weights_N: Tensor | None = None,
    chunk: int = 1024,
) -> Tensor:
    """Sum over positions with a label of weight x cross-entropy(hidden @ weight.T + bias, label).

    Args:
        hidden_ND: [N, D], floating point. Its gradient has its dtype.
        weight_VD: [V, D]. Its gradient is summed in fp32 over chunks, whatever the dtypes.
        labels_N: int64 [N], in [0, V) or IGNORED.
        bias_V: [V] or None. Added in fp32, so a common offset of the logits changes nothing.
        weights_N: [N] or None. A weight per position; no gradient reaches it.
        chunk: the most positions whose logits exist at once.

    Returns: a scalar, fp32 (float64 for float64 input). Without a label it is 0 and gives zero gradients.
    Under autocast the matrix products run in the autocast dtype. Can be differentiated once.

    Raises: ValueError or TypeError for shapes, dtypes, labels or weights that do not fit.
    """
    _check(hidden_ND, weight_VD, labels_N, bias_V, weights_N, chunk)
    compute = _compute_dtype(hidden_ND, weight_VD)
    # A softmax does not see a common offset: taken off the bias first, it costs the logits no digits.
    shifted_V = None if bias_V is None else _without_offset(bias_V.to(_sum_dtype(compute)))
    job = _Job(labels_N, weights_N, chunk, compute, torch.is_grad_enabled())
    with torch.autocast(hidden_ND.device.type, enabled=False):
        return _ChunkedLoss.apply(hidden_ND, weight_VD, shifted_V, job)


def _without_offset(bias_V: Tensor) -> Tensor:
    return bias_V - bias_V.detach().amax()


@dataclass(frozen=True)
class _Job:
    """What has no gradient. `compute` is the dtype of the products; `gradients`: grad mode is on."""

    labels: Tensor
    weights: Tensor | None
    chunk: int
    compute: torch.dtype
    gradients: bool


def _sum_dtype(compute: torch.dtype) -> torch.dtype:
    return torch.float64 if compute == torch.float64 else torch.float32


def _compute_dtype(hidden_ND: Tensor, weight_VD: Tensor) -> torch.dtype:
    """The dtype of the matrix products; autocast leaves float64 alone, as it does for linear layers."""
    kind = hidden_ND.device.type
    if torch.is_autocast_enabled(kind) and torch.float64 not in (hidden_ND.dtype, weight_VD.dtype):
        return torch.get_autocast_dtype(kind)
    if hidden_ND.dtype != weight_VD.dtype:
        raise TypeError(
            f"hidden is {hidden_ND.dtype} and the head's weight {weight_VD.dtype}; cast one or use autocast"
        )
    return hidden_ND.dtype


def _check(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    labels_N: Tensor,
    bias_V: Tensor | None,
    weights_N: Tensor | None,
    chunk: int,
) -> None:
    if hidden_ND.ndim != 2 or weight_VD.ndim != 2 or hidden_ND.shape[1] != weight_VD.shape[1]:
        raise ValueError(f"hidden [N, D] and weight [V, D] wanted, not {hidden_ND.shape} and {weight_VD.shape}")
    count, vocabulary = hidden_ND.shape[0], weight_VD.shape[0]
    if labels_N.shape != (count,) or labels_N.dtype != torch.int64:
        raise ValueError(f"{count} int64 labels wanted, not {labels_N.dtype} {tuple(labels_N.shape)}")
    if bias_V is not None and bias_V.shape != (vocabulary,):
        raise ValueError(f"a bias of {vocabulary} wanted, not {tuple(bias_V.shape)}")
    if weights_N is not None and weights_N.shape != (count,):
        raise ValueError(f"{count} weights wanted, not {tuple(weights_N.shape)}")
    if weights_N is not None and weights_N.requires_grad:
        raise ValueError("the weights of the positions require a gradient, which this loss does not give")
    if chunk < 1:
        raise ValueError(f"chunk must be at least 1, not {chunk}")
    wrong_N = ((labels_N < 0) | (labels_N >= vocabulary)) & (labels_N != IGNORED)
    if bool(wrong_N.any()):
        raise ValueError(f"label {int(labels_N[wrong_N][0])} is outside the vocabulary of {vocabulary}")


class _Gradients:
    """What one pass over the chunks adds up: gradients of hidden (its dtype), weight and bias (the sum dtype)."""

    def __init__(self, hidden_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None, needed: tuple[bool, ...]) -> None:
        add = hidden_ND.dtype if hidden_ND.dtype == torch.float64 else torch.float32
        self.hidden = torch.zeros_like(hidden_ND) if needed[0] else None
        self.weight = torch.zeros_like(weight_VD, dtype=add) if needed[1] else None
        self.bias = torch.zeros_like(bias_V) if needed[2] and bias_V is not None else None

    def add(self, slope_CV: Tensor, hidden_CD: Tensor, weight_VD: Tensor, rows_C: Tensor | slice) -> None:
        """Adds one chunk: `slope_CV` is the loss's derivative by the chunk's logits, in the sum or the compute dtype."""
        if self.bias is not None:
            self.bias += slope_CV.sum(0)
        slope_CV = slope_CV.to(hidden_CD.dtype)
        if self.hidden is not None:
            self.hidden[rows_C] = (slope_CV @ weight_VD).to(self.hidden.dtype)
        if self.weight is None:
            return
        if self.weight.dtype == hidden_CD.dtype:
            self.weight.addmm_(slope_CV.t(), hidden_CD)
        else:
            self.weight += slope_CV.t() @ hidden_CD


class _ChunkedLoss(torch.autograd.Function):
    """Loss and gradients in one pass; backward multiplies by the incoming scalar."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        job: _Job,
    ) -> Tensor:
        labels_N, weights_N = job.labels, job.weights
        needed = tuple(need and job.gradients for need in ctx.needs_input_grad[:3])
        gradients = _Gradients(hidden_ND, weight_VD, bias_V, needed)
        cast_VD = weight_VD.to(job.compute)
        total = torch.zeros((), dtype=torch.float64, device=hidden_ND.device)

        def add_chunk(rows_C: Tensor | slice) -> None:
            # A function, so that one chunk's logits are gone before the next are made.
            hidden_CD = hidden_ND[rows_C].to(job.compute)
            weights_C = None if weights_N is None else weights_N[rows_C]
            logits_CV = hidden_CD @ cast_VD.t()
            if bias_V is None and logits_CV.is_cuda and job.compute != torch.float64:
                total.add_(_fused_loss(logits_CV, labels_N[rows_C], weights_C, slope=any(needed)))
            else:
                logits_CV = logits_CV.to(_sum_dtype(job.compute))
                if bias_V is not None:
                    logits_CV += bias_V
                total.add_(_loss(logits_CV, labels_N[rows_C], weights_C, slope=any(needed)))
            if any(needed):
                gradients.add(logits_CV, hidden_CD, cast_VD, rows_C)

        for rows_C in _chunks(labels_N, job.chunk):
            add_chunk(rows_C)
        ctx.save_for_backward(gradients.hidden, gradients.weight, gradients.bias)
        ctx.weight_dtype = weight_VD.dtype
        return total.to(_sum_dtype(job.compute))

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:
        # Grad mode is on in a backward only with create_graph; the gradients are constants here, so a second derivative
        # would be a silent zero.
        if torch.is_grad_enabled():
            raise RuntimeError("linear_cross_entropy_sum has no second derivatives; use linear_cross_entropy_reference")
        hidden_ND, weight_VD, bias_V = ctx.saved_tensors
        hidden = _scaled(hidden_ND, scale, hidden_ND.dtype if hidden_ND is not None else None)
        weight = _scaled(weight_VD, scale, ctx.weight_dtype)
        return hidden, weight, None if bias_V is None else bias_V * scale, None


def _scaled(gradient: Tensor | None, scale: Tensor, dtype: torch.dtype | None) -> Tensor | None:
    """gradient x scale, multiplied in the wider dtype: 1/1234 rounded to bf16 would bias every element."""
    if gradient is None:
        return None
    result = torch.empty_like(gradient, dtype=dtype)
    return torch.mul(gradient, scale.reshape(1, 1), out=result)


def _chunks(labels_N: Tensor, chunk: int) -> list[Tensor | slice]:
    """Positions with a label, `chunk` at a time: slices if all have one (no copies), else indices."""
    kept = torch.nonzero(labels_N != IGNORED).flatten()
    if kept.numel() == labels_N.numel():
        return [slice(start, start + chunk) for start in range(0, labels_N.numel(), chunk)]
    return list(kept.split(chunk)) if kept.numel() else []


def _fused_loss(logits_CV: Tensor, labels_C: Tensor, weights_C: Tensor | None, slope: bool) -> Tensor:
    """As `_loss`, with logits and derivative in the compute dtype and everything between in fp32."""
    from finetune.kernels.fused import cross_entropy as fused

    return fused.loss_(logits_CV, labels_C.contiguous(), weights_C, slope).sum(dtype=torch.float64)


def _loss(logits_CV: Tensor, labels_C: Tensor, weights_C: Tensor | None, slope: bool) -> Tensor:
    """The chunk's loss; overwrites the logits with the loss's derivative by them (if `slope`), so nothing is copied."""
    logits_CV -= logits_CV.amax(1, keepdim=True)
    wanted_C = logits_CV.gather(1, labels_C[:, None]).squeeze(1)
    logits_CV.exp_()
    sums_C = logits_CV.sum(1)
    losses_C = sums_C.log() - wanted_C
    if weights_C is not None:
        weights_C = weights_C.to(losses_C.dtype)
        losses_C = losses_C * weights_C
    if slope:
        logits_CV /= sums_C[:, None]
        logits_CV[torch.arange(len(labels_C), device=labels_C.device), labels_C] -= 1
        if weights_C is not None:
            logits_CV *= weights_C[:, None]
    return losses_C.sum(dtype=torch.float64)
