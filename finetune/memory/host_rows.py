"""The module that looks embedding rows up in host memory, in the place of nn.Embedding.

The matrix is no parameter: it never trains, moves with nothing, and is not saved. Two pinned buffers take turns, so that
rows are gathered for one micro-batch while those of the one before may still be on their way.

Legend: B rows, S positions, D hidden width, V vocabulary, N tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from finetune.memory.host import HostBuffer, HostPool


class GivenIds:
    """The token ids of the batch at hand as they are on the host, so that a lookup need not ask the device for them."""

    def __init__(self) -> None:
        self.ids_BS: Tensor | None = None

    @contextmanager
    def given(self, ids_BS: Tensor) -> Iterator[None]:
        """Inside, lookups are of `ids_BS`, int64 [B, S] on the host."""
        self.ids_BS = ids_BS
        try:
            yield
        finally:
            self.ids_BS = None


class HostRows(nn.Module):
    """As nn.Embedding over weight_VD, which is copied to the host. `weight` has its sizes and type.

    Ids that `given` holds are used when there are as many; else the ids are fetched from the device.
    """

    def __init__(self, weight_VD: Tensor, device: torch.device, given: GivenIds) -> None:
        super().__init__()
        self.weight = weight_VD.to("cpu", copy=True)
        self.num_embeddings, self.embedding_dim = weight_VD.shape
        self.device = device
        self.given = given
        self.pool = HostPool(device)
        self._turn = 0

    def forward(self, ids_BS: Tensor) -> Tensor:
        given_BS = self.given.ids_BS
        known = given_BS is not None and given_BS.shape == ids_BS.shape
        host_BS = given_BS if given_BS is not None and known else ids_BS.to("cpu")
        count = host_BS.numel() * self.embedding_dim * self.weight.element_size()
        buffer = self._buffer(count)
        rows_ND = buffer.view((host_BS.numel(), self.embedding_dim), self.weight.dtype)
        torch.index_select(self.weight, 0, host_BS.flatten(), out=rows_ND)
        out_BSD = torch.empty((*host_BS.shape, self.embedding_dim), dtype=self.weight.dtype, device=self.device)
        out_BSD.view_as(rows_ND).copy_(rows_ND, non_blocking=True)
        if self.device.type == "cuda":
            buffer.busy = torch.cuda.current_stream(self.device).record_event()
        self.pool.give(buffer)
        return out_BSD

    def _buffer(self, count: int) -> HostBuffer:
        """The buffer whose turn it is, once the rows in it have left."""
        self._turn = 1 - self._turn
        buffer = self.pool.take(self._turn, count)
        if buffer.busy is not None:
            buffer.busy.synchronize()
        return buffer

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, on the host"
