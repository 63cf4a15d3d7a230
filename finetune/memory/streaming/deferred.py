"""The deferred update: gradients and optimizer state of streamed tensors live on the host, and meet the weights at their
next fetch.

A block's gradient goes down when its backward is over. Once the whole step is known (loss and norm finite, the clip's
factor) the update is only promised; it is made when the next forward, or a flush, has the block's weights on the device
anyway. So nothing moves before everything is decided, no second trip of the weights is paid, and a promise not yet kept
when something fails is kept later: every unit says itself whether it is pending.

A unit is a block, or any other set of tensors that is fetched as one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from finetune.kernels.adam_values import Slice
from finetune.kernels.norms import tensor_norm
from finetune.memory.host import host_pages
from finetune.memory.streaming.flat import ALIGNED
from finetune.memory.streaming.lanes import Lane, mark, wait


class Updates(Protocol):
    """What an optimizer promises here (optim/slices.Slicing)."""

    def layout(self, parameter: nn.Parameter) -> dict[str, tuple[int, torch.dtype]]: ...
    def adopt(self, parameter: nn.Parameter, states: Any) -> None: ...
    def next(self, parameter: nn.Parameter) -> Any: ...
    def update(self, parameter: nn.Parameter, hyper: Any, part: Slice) -> None: ...


@dataclass
class _Tensor:
    """One trained tensor of a unit: where its gradient and its states are in the unit's pages (bytes)."""

    parameter: nn.Parameter
    gradient: slice
    states: dict[str, tuple[slice, torch.dtype]]


@dataclass
class _Unit:
    """`pages`: gradients, then states, on the host. `pending`: the updates that are promised, in the tensors' order."""

    tensors: list[_Tensor]
    pages: Tensor
    state_start: int
    pending: list[Any] = field(default_factory=list)
    factor: float = 1.0
    down: Any = None


@dataclass
class _Turn:
    """Device memory of one unit's pages; `used`: its gradients were read, `down`: its states have left."""

    octets: Tensor
    state_start: int
    used: Any
    down: Any
    ready: Any = None


class Deferred:
    """Updates of the trained tensors in `units`."""

    def __init__(self, updates: Updates, units: Sequence[Sequence[nn.Parameter]], device: torch.device) -> None:
        self.updates = updates
        self.device = device
        self.norms: dict[nn.Parameter, Tensor] = {}
        self._up, self._down = Lane(device), Lane(device)
        self._units = [self._unit(parameters) for parameters in units]
        # Where units differ, what waits for gradients must wait for states too.
        starts = {unit.state_start for unit in self._units}
        self._state_start = starts.pop() if len(starts) == 1 else -1
        self._turns: list[_Turn] = []
        self._coming: dict[int, _Turn] = {}
        self._leaving: list[tuple[Any, list[Tensor]]] = []

    @property
    def parameters(self) -> set[nn.Parameter]:
        return {tensor.parameter for unit in self._units for tensor in unit.tensors}

    @property
    def pending(self) -> list[int]:
        """Units whose update is promised and not made."""
        return [number for number, unit in enumerate(self._units) if unit.pending]

    @property
    def host_bytes(self) -> int:
        return sum(unit.pages.numel() for unit in self._units)

    def _unit(self, parameters: Sequence[nn.Parameter]) -> _Unit:
        tensors, start = [], 0

        def place(count: int) -> slice:
            nonlocal start
            here = slice(start, start + count)
            start = -(-here.stop // ALIGNED) * ALIGNED
            return here

        gradients = [place(parameter.numel() * parameter.element_size()) for parameter in parameters]
        state_start = start
        for parameter, gradient in zip(parameters, gradients, strict=True):
            layout = self.updates.layout(parameter)
            states = {name: (place(count * dtype.itemsize), dtype) for name, (count, dtype) in layout.items()}
            tensors.append(_Tensor(parameter, gradient, states))
        return _Unit(tensors, host_pages(start, self.device), state_start)

    def settle(self) -> None:
        """Takes the optimizer's state (new, or restored by a resume) into the units' pages."""
        for unit in self._units:
            unit.pending = []
            for tensor in unit.tensors:
                states = {name: unit.pages[here].view(dtype) for name, (here, dtype) in tensor.states.items()}
                self.updates.adopt(tensor.parameter, states)

    # -- gradients ------------------------------------------------------------------------------------------------

    def lower(self, number: int) -> None:
        """Takes the gradients of a unit's parameters down, notes their norms, and lets go of them on the device."""
        unit = self._units[number]
        self._let_go(1)
        pairs, gone = [], []
        for tensor in unit.tensors:
            parameter = tensor.parameter
            gradient = parameter.grad
            if gradient is None:  # no row reached it
                gradient = torch.zeros_like(parameter)
            self.norms[parameter] = tensor_norm(gradient)
            hosted = unit.pages[tensor.gradient].view(gradient.dtype)
            gradient = gradient.contiguous()  # what is copied must stand until it is down
            pairs.append((hosted, gradient.view(-1)))
            gone.append(gradient)
            parameter.grad = None
        unit.down = self._down.copies(pairs, [mark(self.device), unit.down])
        self._leaving.append((unit.down, gone))

    def drop(self) -> None:
        """The step's gradients are not used."""
        self._let_go(0)
        self.norms = {}

    def recover(self) -> None:
        """After a step that broke off, and once nothing runs on the device any more: lets go of its memory there. Updates
        that were not made stay pending."""
        self._leaving.clear()
        self._coming.clear()
        self._turns.clear()
        self.norms = {}

    def promise(self, factor: float) -> None:
        """Every unit's update is decided: its gradients, times `factor` (1: as they are), at the rates of now."""
        self._let_go(0)
        for unit in self._units:
            unit.pending = [self.updates.next(tensor.parameter) for tensor in unit.tensors]
            unit.factor = factor
        self.norms = {}

    def _let_go(self, left: int) -> None:
        """Frees gradients on their way down, but for the newest `left` units', once the computation waits for them."""
        while len(self._leaving) > left:
            event, tensors = self._leaving.pop(0)
            wait(self.device, event)
            tensors.clear()

    # -- updates --------------------------------------------------------------------------------------------------

    def ask(self, number: int) -> None:
        """Starts to bring up a unit's gradients and state, if its update is pending. At most two units are on their way."""
        unit = self._units[number]
        if not unit.pending or number in self._coming:
            return
        turn = self._turn(unit.pages.numel())
        # States of the turn's last unit may still be on their way down when its gradients are long used.
        read = turn.used if self._state_start == unit.state_start else turn.down
        parts = (slice(0, unit.state_start), read), (slice(unit.state_start, unit.pages.numel()), turn.down)
        for here, busy in parts:
            turn.ready = self._up.copy(turn.octets[here], unit.pages[here], [busy, unit.down])
        self._coming[number] = turn

    def apply(self, number: int) -> bool:
        """Makes a pending update of a unit whose parameters are bound to the device; True when there was one."""
        unit = self._units[number]
        if not unit.pending:
            return False
        self.ask(number)
        turn = self._coming.pop(number)
        octets = turn.octets
        wait(self.device, turn.ready)
        for tensor, hyper in zip(unit.tensors, unit.pending, strict=True):
            parameter = tensor.parameter
            gradient_N = octets[tensor.gradient].view(parameter.dtype)
            if unit.factor != 1.0:
                torch._foreach_mul_([gradient_N], unit.factor)
            states = {name: octets[here].view(dtype) for name, (here, dtype) in tensor.states.items()}
            self.updates.update(parameter, hyper, Slice(parameter.data.view(-1), gradient_N, states))
        unit.pending = []
        pairs = [(unit.pages[unit.state_start :], octets[unit.state_start : unit.pages.numel()])]
        turn.used = mark(self.device)
        unit.down = turn.down = self._down.copies(pairs, [turn.used])
        self._turns.append(turn)
        return True

    def end(self) -> None:
        """After a pass over all units: frees the device's memory of updates."""
        for turn in self._turns:
            wait(self.device, turn.down)
        self._turns.clear()

    def wait(self) -> None:
        """Returns when the host's state is whole."""
        for unit in self._units:
            if unit.down is not None:
                unit.down.synchronize()

    def _turn(self, count: int) -> _Turn:
        """Memory for one unit's pages. All units of a model have nearly the same layout, so gradients lie over gradients."""
        if len(self._turns) + len(self._coming) >= 2 and self._turns:
            turn = self._turns.pop(0)
            if turn.octets.numel() >= count and turn.state_start == self._state_start:
                return turn
            wait(self.device, turn.down)
        largest = max(unit.pages.numel() for unit in self._units)
        now = mark(self.device)
        return _Turn(torch.empty(largest, dtype=torch.uint8, device=self.device), self._state_start, now, now)
