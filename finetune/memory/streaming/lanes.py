"""Copies between host and device beside the computation: a stream a lane, ordered by events; on a CPU plain copies in order.

Nothing here waits on the host. A copy starts after the events it is given, and its own event says when it is over; whoever
uses memory that a lane reads or writes makes his stream wait for that event first. No tensor is marked with
record_stream: the host runs far ahead of the device, so memory that is only freed when an event has passed would pile up.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

PIECE = 32 * 2**20
"""Bytes of one copy: larger ones are cut, so that a small copy of another lane need not wait for a whole block."""


class Lane:
    """One stream for copies on `device`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream: Any = torch.cuda.Stream(device) if device.type == "cuda" else None

    def copy(self, target: Tensor, source: Tensor, after: Iterable[Any] = ()) -> Any:
        """Copies `source` into `target` once all of `after` has happened; returns the event of its end (None on a CPU)."""
        return self.copies([(target, source)], after)

    def copies(self, pairs: Iterable[tuple[Tensor, Tensor]], after: Iterable[Any] = ()) -> Any:
        """As `copy`, for several pairs of equally long contiguous tensors."""
        if self.stream is None:
            for target, source in pairs:
                target.copy_(source)
            return None
        for event in after:
            if event is not None:
                self.stream.wait_event(event)
        with torch.cuda.stream(self.stream):
            for target, source in pairs:
                for to, out in zip(_pieces(target), _pieces(source), strict=True):
                    to.copy_(out, non_blocking=True)
        return self.stream.record_event()


def _pieces(tensor: Tensor) -> list[Tensor]:
    flat = tensor.view(-1)
    each = max(1, PIECE // flat.element_size())
    return [flat] if flat.numel() <= each else list(flat.split(each))


def mark(device: torch.device) -> Any:
    """An event at this place of the computation; None on a CPU."""
    return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None


def wait(device: torch.device, event: Any) -> None:
    """The computation goes on only after the event; the host does not wait."""
    if event is not None:
        torch.cuda.current_stream(device).wait_event(event)
