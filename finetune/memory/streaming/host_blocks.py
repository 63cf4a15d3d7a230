"""A model whose blocks live on the host: put there while it is loaded, and fetched for any forward that is not a step's.

Loading calls `block` as soon as a block is made, so that at most one stands on the device or twice in host memory, and
`rest` once the model is whole: what is not a streamed block goes to the device. From then on every block that is called
finds its weights on the device by itself (evaluation, generation, checks of a loaded model).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from finetune.memory.streaming.flat import Flat
from finetune.memory.streaming.slots import Slots


class HostBlocks:
    """The flat buffers of a model's blocks, and the slots they are fetched into.

    `trained`: the blocks' own weights are trained, so they move with the rest; else only frozen ones do. `resident`: how
    many blocks keep a place on the device, spread evenly.
    """

    def __init__(self, device: torch.device, trained: bool, slots: int, resident: int) -> None:
        self.device = device
        self.trained = trained
        self.count = slots
        self.resident = resident
        self.flats: list[Flat] = []
        self.slots: Slots | None = None
        self._inside: dict[int, Any] = {}
        self._hooks: list[Any] = []

    @property
    def host_bytes(self) -> int:
        return sum(flat.bytes for flat in self.flats)

    def block(self, block: nn.Module) -> None:
        """Takes a block that was just made, before anything is put around it, to the host: every tensor of it."""
        self.flats.append(Flat(block, self.device, True))

    def rest(self, model: nn.Module, blocks: list[nn.Module]) -> None:
        """Takes the blocks that were not yet taken, and sends everything else to the device."""
        for number, block in enumerate(blocks):
            if number == len(self.flats):
                self.flats.append(Flat(block, self.device, self.trained))
        streamed = {id(spot.parameter) for flat in self.flats for spot in flat.spots if spot.parameter is not None}
        inside = {id(module) for block in blocks for module in block.modules()}
        for parameter in model.parameters():
            if id(parameter) not in streamed:
                parameter.data = parameter.data.to(self.device)
        for module in model.modules():
            if id(module) not in inside:
                for name, buffer in module.named_buffers(recurse=False):
                    setattr(module, name, buffer.to(self.device))
        spread = frozenset(spread_evenly(self.resident, len(blocks)))
        self.slots = Slots(self.flats, self.count, self.device, spread)
        self.watch(blocks)

    def watch(self, blocks: Any) -> None:
        """From now on these modules, one a block in order, fetch their block when they are called."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        for number, block in enumerate(blocks):
            self._hooks.append(block.register_forward_pre_hook(self._enter(number)))
            self._hooks.append(block.register_forward_hook(self._leave(number), always_call=True))

    def _enter(self, number: int) -> Any:
        def enter(module: nn.Module, given: Any) -> None:
            assert self.slots is not None
            self._inside[number] = self.slots.using(number)
            self._inside[number].__enter__()

        return enter

    def _leave(self, number: int) -> Any:
        def leave(module: nn.Module, given: Any, out: Any) -> None:
            self._inside.pop(number).__exit__(None, None, None)

        return leave


def spread_evenly(count: int, total: int) -> list[int]:
    """`count` of the numbers below `total`, as evenly spread as whole numbers allow."""
    count = min(count, total)
    return [int((index + 0.5) * total / count) for index in range(count)]
