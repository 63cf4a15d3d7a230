"""A model whose blocks live on the host: put there while it is loaded, and fetched for any forward that is not a step's.

Loading says with `begin` how many blocks will come and calls `block` for each: one that was just made, so that at most one
stands on the device or twice in host memory, or one that is yet to be read, straight into its pages. `rest`, once the model
is whole, takes the blocks that were not given so and sends everything else to the device. From then on every block that is
called finds its weights on the device by itself (evaluation, generation, checks of a loaded model).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from finetune.errors import ModelError, NothingFitsError
from finetune.memory.host import gib, large_tensors_apart, limits
from finetune.memory.streaming.flat import Flat, flat_bytes
from finetune.memory.streaming.slots import Slots


class HostBlocks:
    """The flat buffers of a model's blocks, and the slots they are fetched into.

    `trained`: the blocks' own weights are trained, so they move with the rest; else only frozen ones do. `resident`: how
    many blocks keep a place on the device, spread evenly. `room`: bytes of host memory that the blocks may take (None: not
    looked at). `told(bytes there, bytes of all)` is called while blocks arrive. `ends`, set before
    loading: those of the model ("embedding", "head") that will live on the host too stay there from the start.
    """

    def __init__(
        self,
        device: torch.device,
        trained: bool,
        slots: int,
        resident: int,
        room: int | None = None,
        told: Callable[[int, int], None] | None = None,
    ) -> None:
        self.device = device
        self.trained = trained
        self.count = slots
        self.resident = resident
        self.room = room
        self.told = told
        self.ends: frozenset[str] = frozenset()
        self._staying: list[nn.Module] = []
        self.flats: list[Flat] = []
        self.blocks = 0
        self.slots: Slots | None = None
        self._inside: dict[int, Any] = {}
        self._hooks: list[Any] = []
        large_tensors_apart(True)  # until `rest` or `abandon`

    @property
    def host_bytes(self) -> int:
        return sum(flat.bytes for flat in self.flats)

    def begin(self, blocks: int) -> None:
        """So many blocks will come."""
        self.blocks = blocks

    def block(self, block: nn.Module, fill: Callable[[str, Tensor], None] | None = None) -> None:
        """Takes a block, before anything is put around it, to the host: every tensor of it. With `fill`, its parameters are on
        the meta device and fill(name, view) writes them. NothingFitsError when the blocks do not fit the host."""
        self._take(block, True, fill)

    def _take(self, block: nn.Module, trained: bool, fill: Callable[[str, Tensor], None] | None = None) -> None:
        count = flat_bytes(block, trained)
        self._check(count)
        arrived = self.host_bytes

        def filling(name: str, view: Tensor) -> None:
            nonlocal arrived
            assert fill is not None
            fill(name, view)
            arrived += view.numel() * view.element_size()
            self._tell(arrived, count)

        try:
            self.flats.append(Flat(block, self.device, trained, None if fill is None else filling))
        except NothingFitsError as error:
            raise self._lacking(error.fault.what, count) from error
        self._tell(self.host_bytes, count)

    def _expected(self, count: int) -> int:
        """Bytes of all blocks, when the next one has `count`: those to come are taken to be like it."""
        return self.host_bytes + count * max(1, self.blocks - len(self.flats))

    def _tell(self, arrived: int, count: int) -> None:
        if self.told is not None:
            self.told(arrived, max(arrived, self.host_bytes + count * (self.blocks - len(self.flats))))

    def _check(self, count: int) -> None:
        """Before pages are taken, so that the first block already says that the last one will not fit."""
        if self.room is not None and self._expected(count) > self.room:
            raise self._lacking(f"only {gib(self.room)} of host memory may be taken for them", count)

    def _lacking(self, reason: str, count: int) -> NothingFitsError:
        blocks = max(self.blocks, len(self.flats) + 1)
        how = "pinned" if self.device.type == "cuda" else "taken"
        return NothingFitsError(
            f"the {blocks} streamed blocks need {gib(self._expected(count))} of host memory ({gib(count)} a block); "
            f"{len(self.flats)} ({gib(self.host_bytes)}) were {how}, and the next did not fit: {reason}; {limits()}",
            "plan.weights=streamed",
            "free host memory, raise plan.host_memory, the container's limit or `ulimit -l`, leave some blocks on the device by "
            "plan.weights=resident, or store the frozen base smaller: model.base=nf4",
        )

    def abandon(self) -> None:
        """Gives every page back: loading failed, and the model will not be used."""
        large_tensors_apart(False)
        self._drop_hooks()
        self.slots = None
        for flat in self.flats:
            flat.give_up()
        self.flats, self._staying = [], []

    def rest(self, model: nn.Module, blocks: list[nn.Module], ends: dict[str, nn.Module] | None = None) -> None:
        """Takes the blocks that were not yet taken, and sends everything else to the device, but for those `ends` (embedding
        and head, by name) whose matrices stay on the host."""
        self.blocks = len(blocks)
        for number, block in enumerate(blocks):
            if number == len(self.flats):
                self._take(block, self.trained)
            elif not self.flats[number].still_holds(block):
                # An adapter's start may take its part out of the base; freezing may change a type.
                self.flats[number] = Flat(block, self.device, self.trained)
        self._check_own()
        streamed = {id(spot.parameter) for flat in self.flats for spot in flat.spots if spot.parameter is not None}
        inside = {id(module) for block in blocks for module in block.modules()}
        named = [each for name, each in (ends or {}).items() if name in self.ends]
        # A shared matrix stays for both.
        kept = {id(_matrix(module)) for module in named}
        self._staying = [each for each in (ends or {}).values() if id(_matrix(each)) in kept]
        staying = [_matrix(module) for module in self._staying]
        for parameter in staying:
            parameter.data = parameter.data.to("cpu")
        streamed |= {id(parameter) for parameter in staying}
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
        large_tensors_apart(False)

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Inside, any forward can run: a head is on the device; an embedding looks its rows up on the host and sends them."""
        heads = [_matrix(module) for module in self._staying if not isinstance(module, nn.Embedding)]
        lookups = [module for module in self._staying if isinstance(module, nn.Embedding)]
        there = [(parameter, parameter.data) for parameter in heads]
        hooks = []
        for parameter, data in there:
            parameter.data = data.to(self.device)
        for module in lookups:
            if all(module.weight is not parameter for parameter in heads):
                hooks.append(module.register_forward_pre_hook(lambda module, given: (given[0].to("cpu"),)))
                hooks.append(module.register_forward_hook(lambda module, given, out: out.to(self.device)))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            for parameter, data in there:
                parameter.data = data

    def settled(self) -> None:
        """The ends have their own places on the host now."""
        self._staying = []

    def _check_own(self) -> None:
        """ModelError where two blocks train one tensor: each would update a copy of its own."""
        owned: set[int] = set()
        for number, flat in enumerate(self.flats):
            own = {id(spot.parameter) for spot in flat.trained}
            if own & owned:
                raise ModelError(
                    f"block {number} trains a tensor that an earlier block has too, so they cannot be updated one at a time",
                    "plan.weights",
                    "plan.weights=resident",
                )
            owned |= own

    def watch(self, blocks: Any) -> None:
        """From now on these modules, one a block in order, fetch their block when they are called."""
        self._drop_hooks()
        for number, block in enumerate(blocks):
            self._hooks.append(block.register_forward_pre_hook(self._enter(number)))
            self._hooks.append(block.register_forward_hook(self._leave(number), always_call=True))

    def _drop_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _enter(self, number: int) -> Any:
        def enter(module: nn.Module, given: Any) -> None:
            assert self.slots is not None
            # In a step the block is in its turn already: a second one within would forget the announced order of use.
            there = self.flats[number].away
            self._inside[number] = nullcontext() if there else self.slots.using(number)
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


def _matrix(module: Any) -> nn.Parameter:
    weight: nn.Parameter = module.weight
    return weight
