"""Chunked loss: the logits of a few positions at a time, never all of them.

A vocabulary of 128k makes the logits of 2,048 positions 1 GiB in fp32, three times that in backward. In chunks they
take a fixed amount whatever the batch, for thinner matrix products. The sum over chunks is added in another order.

Three ways, by what the head is. A plain linear goes through the kernel, which makes gradients in forward. Any other
head (an adapter on it, a trained copy, capped logits) runs chunk by chunk under torch's checkpoint, so that its own
forward decides what it computes. `chunk=0` is the plain way: all logits at once.

Legend: B rows, S positions, D hidden width, V vocabulary, N positions of all rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from finetune.contracts import IGNORED, Shape
from finetune.errors import ModelError
from finetune.kernels.logits_change import logits_change
from finetune.memory.case import Case, compute_seconds
from finetune.memory.step_time import micro_batches, step_seconds
from finetune.memory.storage import Storage, Work

if TYPE_CHECKING:
    from torch import Tensor, nn

THIN = {"cpu": 16.0, "cuda": 64.0}
"""Positions that a chunk's matrix products cost extra, as if they were longer. CPU: measured with 576 x 49,152."""
THIN_TRAINED = 256.0
"""The same for a trained head on a GPU: a chunk reads and writes the fp32 gradient of the whole head."""


@dataclass(frozen=True)
class LossBytes:
    """Bytes of the loss at one moment: `logits`, and `workspace` (the head's input, gradients, casts)."""

    logits: int
    workspace: int

    @property
    def total(self) -> int:
        return self.logits + self.workspace


def loss_moments(
    shape: Shape, storage: Storage, work: Work, chunk: int, gradients: bool = True
) -> tuple[LossBytes, LossBytes]:
    """The widest moments of the loss's forward and of its backward, if every position has a label."""
    hidden = work.tokens * storage.stream * shape.hidden
    head = shape.vocabulary * shape.hidden
    cast = storage.compute * head if storage.whole_head and storage.compute < storage.weight else 0
    if chunk == 0 or storage.own_head:
        return _plain_moments(shape, storage, work, chunk, cast)
    # A GPU's kernel overwrites the logits as they were made; elsewhere they are copied to fp32 first.
    each = storage.compute if storage.device == "cuda" else 6 if storage.compute < 4 else 4
    logits = min(chunk, work.tokens) * shape.vocabulary * each
    if not gradients:
        return LossBytes(logits, hidden + cast), LossBytes(0, 0)
    forward = 2 * hidden + cast
    if not storage.whole_head:
        return LossBytes(logits, forward), LossBytes(0, 2 * hidden)
    partial = storage.compute * head if storage.compute < 4 else 0
    return LossBytes(logits, forward + 4 * head + partial), LossBytes(0, 2 * hidden + (4 + storage.weight) * head)


def _plain_moments(shape: Shape, storage: Storage, work: Work, chunk: int, cast: int) -> tuple[LossBytes, LossBytes]:
    """All logits at once, or a chunk of them under checkpoint: fp32 logits and their log-softmax in forward, the latter
    and two gradients in backward; or the logits' gradient beside the head's."""
    positions = min(chunk, work.tokens) if chunk else work.tokens
    copy = positions * storage.stream * shape.hidden
    hidden = work.tokens * storage.stream * shape.hidden
    saved = (copy + (positions * storage.compute * shape.hidden if storage.cast else 0)) if storage.whole_head else 0
    forward = LossBytes(positions * shape.vocabulary * 8, hidden + copy + cast)
    kept = saved + cast + (hidden if chunk else 0)
    backward = LossBytes(positions * shape.vocabulary * 12, kept)
    if not storage.whole_head:
        return forward, backward
    head = shape.vocabulary * shape.hidden
    at_head = LossBytes(
        positions * shape.vocabulary * storage.compute, kept + (6 if storage.compute < 4 else 4) * head + copy
    )
    return forward, max(backward, at_head, key=lambda moment: moment.total)


def loss_bytes(shape: Shape, storage: Storage, work: Work, chunk: int) -> int:
    """The widest moment of the loss."""
    return max(moment.total for moment in loss_moments(shape, storage, work, chunk))


def saves(case: Case) -> int:
    """Bytes of the loss that the lever takes away."""
    shape, storage, work = case.shape, case.storage, case.work
    return loss_bytes(shape, storage, work, 0) - loss_bytes(shape, storage, work, case.plan.loss_chunk)


def slowdown(case: Case) -> float:
    """The share of a step's time that the lever adds."""
    shape, storage, work, chunk = case.shape, case.storage, case.work, case.plan.loss_chunk
    if chunk == 0 or (chunk >= work.tokens and not storage.own_head):
        return 0.0
    head = 2.0 * shape.vocabulary * shape.hidden
    thin = THIN.get(storage.device, 64.0) + (THIN_TRAINED if storage.whole_head and storage.device == "cuda" else 0.0)
    again = 1.0 if storage.own_head else 0.0
    extra = (3 if storage.whole_head else 2) * head * thin / chunk + again * head
    return micro_batches(case) * compute_seconds(case, work.tokens * extra) / step_seconds(case)


def loss_sum(hidden_BSD: Tensor, head: nn.Module, labels_BS: Tensor, chunk: int, config: Any = None) -> Tensor:
    """The sum of next-token cross-entropies: position t is held to labels[t + 1].

    Args:
        hidden_BSD: the backbone's output [B, S, D], after the final norm.
        head: the output projection, D to V.
        labels_BS: int64 [B, S]; they stand on the token itself, IGNORED where it is not trained.
        chunk: positions whose logits exist at once; 0: all.
        config: the model's config. Its scaling or capping of logits is applied as the model's own forward does.

    Returns: a fp32 scalar that can be differentiated; 0 with zero gradients where nothing is trained.
    Raises: ModelError for logits that are changed in a way that is not known here.
    """
    import torch
    from torch.nn import functional

    # The labels move, not the hidden states: shifting those would copy them.
    next_BS = functional.pad(labels_BS[:, 1:], (0, 1), value=IGNORED)
    change = logits_change(config)
    if type(head) is not torch.nn.Linear or change is not None:
        return _any_head(hidden_BSD, head, next_BS, chunk, change)
    from finetune.kernels.linear_cross_entropy import linear_cross_entropy_reference, linear_cross_entropy_sum

    hidden_ND, labels_N = hidden_BSD.flatten(0, 1), next_BS.flatten()
    if chunk:
        return linear_cross_entropy_sum(hidden_ND, head.weight, labels_N, head.bias, chunk=chunk)
    kept_N = labels_N != IGNORED
    return linear_cross_entropy_reference(hidden_ND[kept_N], head.weight, labels_N[kept_N], head.bias)


def _any_head(
    hidden_BSD: Tensor, head: nn.Module, next_BS: Tensor, chunk: int, change: Callable[[Tensor], Tensor] | None
) -> Tensor:
    """The sum through the head's own forward, `chunk` positions at a time, each recomputed in its backward."""
    from torch.nn import functional
    from torch.utils.checkpoint import checkpoint

    def part(hidden: Tensor, labels: Tensor) -> Tensor:
        logits = head(hidden)
        logits = (logits if change is None else change(logits)).float()
        return functional.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=IGNORED, reduction="sum")

    if not chunk:
        return part(hidden_BSD, next_BS)
    _refuse_dropout(head)
    hidden_ND, labels_N = hidden_BSD.flatten(0, 1), next_BS.flatten()
    kept = (labels_N != IGNORED).nonzero().flatten()
    total = (hidden_ND[:0].sum() * 0).float()
    for rows in kept.split(chunk) if kept.numel() else ():
        total = total + checkpoint(part, hidden_ND[rows], labels_N[rows], use_reentrant=False)
    return total


def _refuse_dropout(head: nn.Module) -> None:
    """Keyed dropout draws by row and position, which a chunk of loose positions has lost."""
    for name, part in head.named_modules():
        rate = getattr(part, "p", 0.0)
        if head.training and "Dropout" in type(part).__name__ and isinstance(rate, float) and rate > 0:
            raise ModelError(
                f"the head has dropout ({name}, p={rate}), whose draws a chunked loss would change",
                where="plan.loss_chunk",
                remedy="plan.loss_chunk=0, adapter.dropout=0, or no adapter on the head",
            )
