"""The task text: next-token prediction on the tokens whose labels say so.

The loss is a sum over trained tokens; the loop divides it once by the count of the whole step, so neither the
micro-batch, nor accumulation, nor the number of processes changes a gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from finetune.contracts import IGNORED, Batch, Model, Plan, Row
from finetune.data.loader import collate
from finetune.memory.chunked_loss import loss_sum
from finetune.models.decoder import hidden_states


@dataclass(frozen=True)
class TextTask:
    """Next-token prediction with a causal language model."""

    pad_id: int
    batch_coupled: bool = False

    def collate(self, rows: Sequence[Row]) -> Batch:
        """Rows padded on the right to the longest."""
        return collate(rows, self.pad_id)

    def count(self, batch: Batch) -> int:
        """Trained tokens. Labels stand on the token itself, and the first of a row has nothing that predicts it."""
        return int((batch.labels[:, 1:] != IGNORED).sum())

    def tokens(self, batch: Batch) -> int:
        """Tokens without the padding."""
        return sum(batch.lengths)

    def loss_sum(self, model: Model, batch: Batch, plan: Plan) -> Tensor:
        """The summed cross-entropy of the batch's trained tokens: fp32 scalar."""
        return self.loss_of(hidden_states(model, batch), model, batch, plan)

    def loss_of(self, hidden_BSD: Tensor, model: Model, batch: Batch, plan: Plan) -> Tensor:
        """The same from the head's input [B, S, D]."""
        return loss_sum(hidden_BSD, model.head, batch.labels, plan.loss_chunk, model.base.config)


def prompt_and_answer(row: Row) -> tuple[list[int], list[int]]:
    """A document's tokens before its first trained one, and the trained ones that follow without a gap."""
    ids, labels = row.input_ids.tolist(), row.labels.tolist()
    start = next((i for i, label in enumerate(labels) if label != IGNORED), len(ids))
    end = next((i for i in range(start, len(ids)) if labels[i] == IGNORED), len(ids))
    return ids[:start], ids[start:end]
