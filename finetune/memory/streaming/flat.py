"""One flat host buffer for all tensors of a block, and the binding of the block's modules to it or to a copy on the device.

Outside of its turn a block's parameters are views of the host buffer: whatever reads a model (saving, merging, export)
sees ordinary tensors on the CPU. In its turn they are views of a slot on the device. Names, modules and parameter objects
stay as they are; only where their bytes are changes. Quantised layers keep bytes outside their parameters (scales and
tables of 4-bit weights, codes of 8-bit ones): those move along.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from finetune.memory.host import host_pages

ALIGNED = 256
"""Bytes at whose multiples tensors start, so that kernels see the same alignment as with tensors of their own."""
SCALES = ("absmax", "code", "offset")
"""Tensors of a 4-bit weight's state; `state2` holds those of its scales, where they are quantised too."""


@dataclass(frozen=True)
class Spot:
    """A tensor's place in a flat buffer: `start` in bytes; `bind` gives its owner another tensor of the same form."""

    bind: Callable[[Tensor], None]
    shape: torch.Size
    dtype: torch.dtype
    start: int
    parameter: nn.Parameter | None

    @property
    def stop(self) -> int:
        return self.start + self.shape.numel() * self.dtype.itemsize

    def view(self, octets_N: Tensor) -> Tensor:
        """The tensor in a buffer of this layout."""
        return octets_N[self.start : self.stop].view(self.dtype).view(self.shape)


class Flat:
    """A block's streamed tensors in pages of the host, pinned where `device` is a GPU.

    With `trained`, parameters that require a gradient move too; else they stay where they are (adapters on the device).
    `bytes` is the length of the buffer. The block's tensors are copied in and bound to the host at once.
    """

    def __init__(self, block: nn.Module, device: torch.device, trained: bool) -> None:
        found = list(_tensors(block, trained))
        self.spots: list[Spot] = []
        start = 0
        for tensor, bind, parameter in found:
            self.spots.append(Spot(bind, tensor.shape, tensor.dtype, start, parameter))
            start = -(-self.spots[-1].stop // ALIGNED) * ALIGNED
        self.bytes = start
        self.host = host_pages(start, device)
        self._views: dict[int, list[Tensor]] = {}
        for spot, (tensor, _, _) in zip(self.spots, found, strict=True):
            spot.view(self.host).copy_(tensor.detach())
        self.bind(self.host)

    @property
    def trained(self) -> list[Spot]:
        """The places of trained parameters."""
        return [spot for spot in self.spots if spot.parameter is not None and spot.parameter.requires_grad]

    def bind(self, octets_N: Tensor) -> None:
        """Makes every tensor of the block a view of this buffer."""
        views = self._views.get(octets_N.data_ptr())
        if views is None:
            views = self._views[octets_N.data_ptr()] = [spot.view(octets_N) for spot in self.spots]
        for spot, view in zip(self.spots, views, strict=True):
            spot.bind(view)

    def release(self) -> None:
        """Binds the block to the host again."""
        self.bind(self.host)

    def forget(self) -> None:
        """Lets go of views of buffers that are given up."""
        self._views = {self.host.data_ptr(): [spot.view(self.host) for spot in self.spots]}


def _tensors(block: nn.Module, trained: bool) -> Iterator[tuple[Tensor, Callable[[Tensor], None], nn.Parameter | None]]:
    """Each tensor that moves, how to give its owner another, and the parameter that it is the data of."""
    for parameter in block.parameters():
        if parameter.requires_grad and not trained:
            continue
        yield parameter.data, partial(_set_data, parameter), parameter
        state = getattr(parameter, "quant_state", None)
        for owner in (state, getattr(state, "state2", None)):
            for name in SCALES if owner is not None else ():
                value = getattr(owner, name, None)
                if isinstance(value, Tensor):
                    yield value, partial(setattr, owner, name), None
    for module in block.modules():
        for name, buffer in module.named_buffers(recurse=False):
            yield buffer, partial(setattr, module, name), None


def _set_data(parameter: Any, tensor: Tensor) -> None:
    parameter.data = tensor
