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
        return _view(octets_N, self.start, self.shape, self.dtype)


class Flat:
    """A block's streamed tensors in pages of the host, pinned where `device` is a GPU.

    With `trained`, parameters that require a gradient move too; else they stay where they are (adapters on the device).
    `bytes` is the length of the buffer. The block's tensors are copied in and bound to the host at once. Parameters on the
    meta device get their place there instead, as parameters anew, and `fill(name, view)` writes each one's values.
    """

    def __init__(
        self,
        block: nn.Module,
        device: torch.device,
        trained: bool,
        fill: Callable[[str, Tensor], None] | None = None,
    ) -> None:
        forms = [(tensor.shape, tensor.dtype) for tensor, _, _ in _tensors(block, trained)]
        starts, self.bytes = _places(forms)
        self.host = host_pages(self.bytes, device)
        views = [_view(self.host, start, *form) for start, form in zip(starts, forms, strict=True)]
        if fill is not None:
            _settle(
                block, [(tensor, view) for (tensor, _, _), view in zip(_tensors(block, trained), views, strict=True)]
            )
            for name, placed in block.named_parameters():
                fill(name, placed.data)
        self.spots: list[Spot] = []
        self.away = False
        """Whether the block is bound to another buffer than the host's: it is in its turn."""
        for (tensor, bind, parameter), view, start in zip(_tensors(block, trained), views, starts, strict=True):
            self.spots.append(Spot(bind, tensor.shape, tensor.dtype, start, parameter))
            if tensor.data_ptr() != view.data_ptr():
                view.copy_(tensor.detach())
        self._views: dict[int, list[Tensor]] = {self.host.data_ptr(): views}
        self.bind(self.host)

    def still_holds(self, block: nn.Module) -> bool:
        """Whether the block's tensors are still the buffer's: somebody may have given one other memory, or another type."""
        held = {(tensor.data_ptr(), tensor.dtype) for tensor, _, _ in _tensors(block, True)}
        return all((self.host.data_ptr() + spot.start, spot.dtype) in held for spot in self.spots if spot.shape.numel())

    def give_up(self) -> None:
        """Lets go of the pages; the block's tensors are empty from now on."""
        for spot in self.spots:
            spot.bind(torch.empty(0, dtype=spot.dtype))
        self._views = {}
        self.spots = []
        self.host = torch.empty(0, dtype=torch.uint8)

    @property
    def trained(self) -> list[Spot]:
        """The places of trained parameters."""
        return [spot for spot in self.spots if spot.parameter is not None and spot.parameter.requires_grad]

    def bind(self, octets_N: Tensor) -> None:
        """Makes every tensor of the block a view of this buffer."""
        self.away = octets_N.data_ptr() != self.host.data_ptr()
        views = self._views.get(octets_N.data_ptr())
        if views is None:
            views = self._views[octets_N.data_ptr()] = [spot.view(octets_N) for spot in self.spots]
        for spot, view in zip(self.spots, views, strict=True):
            spot.bind(view)

    def release(self) -> None:
        """Binds the block to the host again."""
        self.bind(self.host)

    def forget(self, octets_N: Tensor) -> None:
        """Lets go of the views of a buffer that is given up: they would keep its memory."""
        self._views.pop(octets_N.data_ptr(), None)


def flat_bytes(block: nn.Module, trained: bool) -> int:
    """Bytes of the flat buffer that a block will need, whatever device it is on."""
    return _places([(tensor.shape, tensor.dtype) for tensor, _, _ in _tensors(block, trained)])[1]


def _places(forms: list[tuple[torch.Size, torch.dtype]]) -> tuple[list[int], int]:
    """Where each tensor starts, and the length of them all."""
    starts, start = [], 0
    for shape, dtype in forms:
        starts.append(start)
        start = -(-(start + shape.numel() * dtype.itemsize) // ALIGNED) * ALIGNED
    return starts, start


def _view(octets_N: Tensor, start: int, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    return octets_N[start : start + shape.numel() * dtype.itemsize].view(dtype).view(shape)


def _settle(block: nn.Module, pairs: list[tuple[Tensor, Tensor]]) -> None:
    """Puts a parameter over each view in the place of the one on the meta device, wherever the block has it.

    A meta parameter cannot be given other data, so it is another object; its `requires_grad` stays.
    """
    views = iter(view for tensor, view in pairs if tensor.is_meta)
    made: dict[int, nn.Parameter] = {}
    for parameter in block.parameters():
        if parameter.is_meta:
            made[id(parameter)] = nn.Parameter(next(views), requires_grad=parameter.requires_grad)
    for module in block.modules():
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if id(parameter) in made:
                setattr(module, name, made[id(parameter)])


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
