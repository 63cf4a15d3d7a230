"""The inputs of blocks between forward and backward, per micro-batch, on the device or in pinned host memory.

They are all that a streamed step keeps of its forward. On the way back they come up into a few buffers in turn, ahead of
the computation.

Legend: B rows, S positions, D hidden width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from finetune.memory.host import HostBuffer, HostPool
from finetune.memory.streaming.lanes import Lane, mark, wait


class Boundaries:
    """Inputs of `blocks` for the micro-batches of a step. `on_host`: they are kept in host memory."""

    def __init__(self, device: torch.device, on_host: bool) -> None:
        self.device = device
        self.on_host = on_host
        self.pool = HostPool(device)
        self.up = Lane(device)
        self.down = Lane(device)
        self._buffers: dict[int, HostBuffer] = {}
        self._kept: dict[tuple[int, int], Tensor] = {}
        self._events: dict[tuple[int, int], Any] = {}
        self._coming: list[tuple[tuple[int, int], Tensor, Any]] = []
        self._starts: list[int] = []
        self._total = 0
        self._rings: list[tuple[Tensor, Any]] = []

    def begin(self, inputs: Sequence[Tensor], blocks: Sequence[int]) -> None:
        """Makes room for one step: inputs like these [B, S, D] of every one of `blocks`."""
        sizes = [-(-each.numel() * each.element_size() // 256) * 256 for each in inputs]
        self._starts = [sum(sizes[:part]) for part in range(len(sizes))]
        self._total = sum(sizes)
        if self.on_host:
            self._buffers = {block: self.pool.take(block, self._total) for block in blocks}

    def keep(self, block: int, part: int, x_BSD: Tensor) -> Any:
        """Keeps a block's input, which is contiguous; `x_BSD` may be given up or overwritten after the event that is returned."""
        if not self.on_host:
            self._kept[block, part] = x_BSD
            return None
        start = self._starts[part]
        octets = self._buffers[block].pages[start : start + x_BSD.numel() * x_BSD.element_size()]
        host_BSD = octets.view(x_BSD.dtype).view(x_BSD.shape)
        # A copy made here would be freed, and its memory used again, before it is down.
        assert x_BSD.is_contiguous()
        event = self.down.copy(host_BSD, x_BSD, [mark(self.device)])
        self._kept[block, part], self._events[block, part] = host_BSD, event
        return event

    def fetch(self, block: int, part: int) -> None:
        """Starts to bring an input up; there are as many buffers as inputs were ever asked for and not given back."""
        if not self.on_host:
            return
        host_BSD = self._kept[block, part]
        octets, busy = self._ring(host_BSD.numel() * host_BSD.element_size())
        x_BSD = octets[: host_BSD.numel() * host_BSD.element_size()].view(host_BSD.dtype).view(host_BSD.shape)
        event = self.up.copy(x_BSD, host_BSD, [busy, self._events[block, part]])
        self._coming.append(((block, part), octets, event))

    def take(self, block: int, part: int) -> Tensor:
        """An input that was fetched, oldest first; `give` it back when the computation that reads it is queued."""
        if not self.on_host:
            return self._kept.pop((block, part))
        key, octets, event = self._coming[0]
        assert key == (block, part)
        wait(self.device, event)
        host_BSD = self._kept.pop((block, part))
        return octets[: host_BSD.numel() * host_BSD.element_size()].view(host_BSD.dtype).view(host_BSD.shape)

    def give(self) -> None:
        """The buffer of the last input taken may be overwritten once the computation has come this far."""
        if self.on_host:
            _, octets, _ = self._coming.pop(0)
            self._rings.append((octets, mark(self.device)))

    def end(self) -> None:
        """The step is over: the host's pages wait for the next one, the device's memory is free."""
        for buffer in self._buffers.values():
            self.pool.give(buffer)
        self._buffers, self._events = {}, {}
        self._kept.clear()
        self._coming.clear()
        self._rings.clear()

    def _ring(self, count: int) -> tuple[Tensor, Any]:
        if self._rings:
            octets, busy = self._rings.pop(0)
            if octets.numel() >= count:
                return octets, busy
            wait(self.device, busy)
        return torch.empty(count, dtype=torch.uint8, device=self.device), mark(self.device)
