"""The two ends of a streamed model: an embedding and a head that live on the host and pass through the device in parts.

The head: all positions with a label are taken together. Its parts pass twice, once for each position's sum over the
vocabulary, once for the slopes, so that never more than a part of the matrix, and a tile's logits for it, are on the device.
The embedding: tokens are sorted by id once a step; each part that passes hands out its rows, and at the end of backward the
same order adds up its gradient.

Sums are in fp32 and in another order than those of a resident head and embedding: the same to a few roundings.

Legend: B rows, S positions, D width, V words, N positions with a label, C words of a part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from finetune.contracts import IGNORED, Batch
from finetune.kernels.adapted_linear import product
from finetune.kernels.embedding import embedding_gradient
from finetune.kernels.vocabulary_loss import Sums, absorb, slope_
from finetune.memory.streaming.lanes import wait
from finetune.memory.streaming.tall import Tall
from finetune.memory.weight_streaming import TILE, TOGETHER


@dataclass(frozen=True)
class _Labelled:
    """The positions of one micro-batch that have a label, as places of its flattened rows, and their labels."""

    places: Tensor
    labels: Tensor


class StreamedHead:
    """The loss of all micro-batches over a head on the host. `layers.finish` gives the head's input; `dtype` is what products
    are made in."""

    def __init__(self, layers: Any, tall: Tall, dtype: torch.dtype) -> None:
        self.layers = layers
        self.tall = tall
        self.dtype = dtype
        self.trained = tall.updates is not None
        self._labelled: list[_Labelled] = []

    def begin(self, batches: Sequence[Batch]) -> None:
        """Finds the labelled positions. Waits for the device, so it comes before anything is queued there."""
        self._labelled = []
        for batch in batches:
            next_BS = functional.pad(batch.labels[:, 1:], (0, 1), value=IGNORED).flatten()
            places = (next_BS != IGNORED).nonzero().flatten()
            self._labelled.append(_Labelled(places, next_BS[places]))

    def run(self, batches: Sequence[Batch], carry: list[Tensor], enter: Any, factor: float) -> list[Tensor]:
        """The summed loss of each micro-batch; what is carried becomes its gradient, times `factor`."""
        losses: list[Tensor] = []
        for group in self._groups():
            losses += self._group(group, batches, carry, enter, factor)
        return losses

    def _groups(self) -> list[list[int]]:
        groups: list[list[int]] = [[]]
        count = 0
        for number, each in enumerate(self._labelled):
            if groups[-1] and not self.trained and count + len(each.places) > TOGETHER:
                groups.append([])
                count = 0
            groups[-1].append(number)
            count += len(each.places)
        return groups

    @torch.no_grad()
    def _group(
        self, group: list[int], batches: Sequence[Batch], carry: list[Tensor], enter: Any, factor: float
    ) -> list[Tensor]:
        counts = [len(self._labelled[number].places) for number in group]
        hidden_ND = torch.empty(sum(counts), carry[0].shape[-1], dtype=self.dtype, device=carry[0].device)
        for number, mine_ND in zip(group, hidden_ND.split(counts), strict=True):
            with enter(batches[number]):
                out_BSD = self.layers.finish(carry[number], batches[number])
            mine_ND.copy_(out_BSD.flatten(0, 1)[self._labelled[number].places])
            del out_BSD
        labels_N = torch.cat([self._labelled[number].labels for number in group])
        sums = self._sums(hidden_ND, labels_N)
        losses = [part.sum(dtype=torch.float64).float() for part in sums.losses().split(counts)]
        grad_ND = self._slopes(hidden_ND, labels_N, sums, factor)
        del hidden_ND
        for number, mine_ND in zip(group, grad_ND.split(counts), strict=True):
            carry[number] = self._into_carry(batches[number], carry[number], number, mine_ND, enter, factor)
        return losses

    def _sums(self, hidden_ND: Tensor, labels_N: Tensor) -> Sums:
        sums = Sums.empty(len(labels_N), hidden_ND.device)
        for rows, weight_CD in self.tall.passing():
            cast_CD = weight_CD.to(self.dtype)
            for tile in _tiles(len(labels_N)):
                absorb(hidden_ND[tile] @ cast_CD.t(), labels_N[tile], rows.start, sums.part(tile))
        return sums

    def _slopes(self, hidden_ND: Tensor, labels_N: Tensor, sums: Sums, factor: float) -> Tensor:
        """The gradient of the head's input, fp32 and without `factor`; the head's own goes down with it."""
        grad_ND = torch.zeros(hidden_ND.shape, device=hidden_ND.device)
        leaving: list[tuple[Any, Tensor]] = []
        for number, (rows, weight_CD) in enumerate(self.tall.passing()):
            cast_CD = weight_CD.to(self.dtype)
            own_CD = torch.zeros(weight_CD.shape, device=weight_CD.device) if self.trained else None
            for tile in _tiles(len(labels_N)):
                logits_TC = hidden_ND[tile] @ cast_CD.t()
                slope_(logits_TC, labels_N[tile], rows.start, sums.part(tile))
                grad_ND[tile] += product(logits_TC, cast_CD, torch.float32)
                if own_CD is not None:
                    own_CD += product(logits_TC.t(), hidden_ND[tile], torch.float32)
                del logits_TC
            if own_CD is not None:
                lowered_CD = own_CD.mul_(factor).to(weight_CD.dtype)
                while leaving:
                    wait(self.tall.device, leaving.pop(0)[0])
                leaving.append((self.tall.lower(number, lowered_CD), lowered_CD))
        for event, _ in leaving:
            wait(self.tall.device, event)
        return grad_ND

    def _into_carry(
        self, batch: Batch, x_BSD: Tensor, number: int, mine_ND: Tensor, enter: Any, factor: float
    ) -> Tensor:
        """Through the final norm back: the gradient of the last block's output."""
        with torch.enable_grad(), enter(batch):
            x_BSD = x_BSD.detach().requires_grad_()
            out_BSD = self.layers.finish(x_BSD, batch)
        slope_BSD = torch.zeros_like(out_BSD)
        slope_BSD.flatten(0, 1)[self._labelled[number].places] = (mine_ND * factor).to(out_BSD.dtype)
        out_BSD.backward(slope_BSD)
        assert x_BSD.grad is not None
        return x_BSD.grad


def _tiles(count: int) -> list[slice]:
    return [slice(start, min(start + TILE, count)) for start in range(0, count, TILE)]


class StreamedEmbedding:
    """Lookup and gradient of an embedding on the host. `padding`: the id whose row has no gradient."""

    def __init__(self, tall: Tall, padding: int | None) -> None:
        self.tall = tall
        self.padding = padding
        self.trained = tall.updates is not None
        self._sorted = torch.empty(0)
        self._order = torch.empty(0)
        self._ends: list[int] = []

    @torch.no_grad()
    def begin(self, batches: Sequence[Batch]) -> list[Tensor]:
        """Each micro-batch's first hidden states [B, S, D]. Waits for the device once."""
        ids_N = torch.cat([batch.input_ids.flatten() for batch in batches])
        self._sorted, self._order = torch.sort(ids_N, stable=True)
        stops = torch.tensor([0, *(rows.stop for rows in self.tall.parts)], device=ids_N.device)
        self._ends = torch.searchsorted(self._sorted, stops).tolist()
        width = self.tall.weight_VD.shape[1]
        x_ND = torch.empty(len(ids_N), width, dtype=self.tall.weight_VD.dtype, device=ids_N.device)
        for number, (rows, weight_RD) in enumerate(self.tall.passing()):
            here = slice(self._ends[number], self._ends[number + 1])
            x_ND.index_copy_(0, self._order[here], weight_RD.index_select(0, self._sorted[here] - rows.start))
        counts = [batch.input_ids.numel() for batch in batches]
        # Memory of their own: as views, all would stand until the last is gone.
        parts = zip(x_ND.split(counts), batches, strict=True)
        return [part.view(*batch.input_ids.shape, width).clone() for part, batch in parts]

    @torch.no_grad()
    def finish(self, carry: list[Tensor]) -> None:
        """Takes the gradient of the first hidden states; the embedding's own is made from it part by part."""
        width = carry[0].shape[-1]
        grad_ND = torch.empty(sum(part.numel() for part in carry) // width, width, dtype=carry[0].dtype,
                              device=carry[0].device)  # fmt: skip
        start = 0
        for at, part_BSD in enumerate(carry):
            count = part_BSD.numel() // width
            grad_ND[start : start + count] = part_BSD.reshape(count, width)
            start += count
            carry[at] = torch.empty(0)
        sorted_N, order_N, ends, parts = self._sorted, self._order, self._ends, self.tall.parts

        def added(rows: slice) -> Tensor:
            number = parts.index(rows)
            here = slice(ends[number], ends[number + 1])
            gradient_RD = embedding_gradient(
                grad_ND, sorted_N[here] - rows.start, order_N[here], rows.stop - rows.start, self.tall.weight_VD.dtype
            )
            if self.padding is not None and rows.start <= self.padding < rows.stop:
                gradient_RD[self.padding - rows.start] = 0
            return gradient_RD

        self.tall.added = added
        self.tall.measure()
