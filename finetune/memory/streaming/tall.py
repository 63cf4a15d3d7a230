"""A tall matrix (embedding, head) on the host that passes through the device in parts of its rows.

Its gradient and optimizer state live beside it, and an update that is promised is made while the parts pass, as for blocks.
Two parts are on the device at a time: one in use, one coming. Where a pass breaks off half-way, the parts that were
updated are known, and the next pass goes on with the others.

Legend: V rows (words), D width, R rows of a part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from finetune.kernels.adam_values import Slice
from finetune.kernels.norms import joined, tall_rows, tensor_norm
from finetune.memory.host import host_pages
from finetune.memory.streaming.lanes import Lane, mark, wait


class Tall:
    """One [V, D] parameter, frozen or (with `updates`, of optim/slices) trained; it is bound to the host at once."""

    def __init__(self, parameter: nn.Parameter, device: torch.device, updates: Any = None) -> None:
        self.parameter = parameter
        self.device = device
        self.updates = updates
        rows, width = parameter.shape
        each = tall_rows(rows, width)
        self.parts = [slice(start, min(start + each, rows)) for start in range(0, rows, each)]
        self.weight_VD = self._pages(parameter.numel(), parameter.dtype).view(parameter.shape)
        self.weight_VD.copy_(parameter.detach())
        parameter.data = self.weight_VD
        self.gradient_VD: Tensor | None = None
        self.states: dict[str, Tensor] = {}
        self.norms: dict[int, Tensor] = {}
        self.added: Callable[[slice], Tensor] | None = None
        """What the gradient of some rows has beside what is on the host, made on the device when it is asked for."""
        self.hosted = False
        """Whether this step's gradient is (also) on the host."""
        self._hyper: Any = None
        self._factor = 1.0
        self._left: list[int] = []
        self._up, self._down = Lane(device), Lane(device)
        self._last: _Turn | None = None
        self._lowered: list[Any] = [None] * len(self.parts)
        if updates is not None:
            self.gradient_VD = self._pages(parameter.numel(), parameter.dtype).view(parameter.shape)
            self.states = {name: self._pages(*form) for name, form in updates.layout(parameter).items()}
            self.settle()

    @property
    def pending(self) -> bool:
        return bool(self._left)

    @property
    def host_bytes(self) -> int:
        held = [self.weight_VD, *self.states.values(), *([] if self.gradient_VD is None else [self.gradient_VD])]
        return sum(tensor.numel() * tensor.element_size() for tensor in held)

    def settle(self) -> None:
        """Takes the optimizer's state (new, or restored by a resume) into its pages."""
        self._left, self.added, self.hosted = [], None, False
        if self.updates is not None:
            self.updates.adopt(self.parameter, self.states)

    def passing(self) -> Iterator[tuple[slice, Tensor]]:
        """Every part in order: its rows, and its weight [R, D] on the device, good until the next is asked for.

        A pending update is made on the way.
        """
        updating = self.pending
        coming = [self._fetch(0)]
        for number, rows in enumerate(self.parts):
            if number + 1 < len(self.parts):
                coming.append(self._fetch(number + 1, self._last))
            turn = coming.pop(0)
            wait(self.device, turn.ready)
            if number in self._left:
                self._update(number, turn)
            yield rows, turn.tensors["weight"]
            turn.busy.append(mark(self.device))
            self._last = turn
        wait(self.device, self._lowered[-1])
        self._last = None
        if updating:
            self.added, self.hosted = None, False

    def lower(self, number: int, gradient_RD: Tensor) -> Any:
        """Takes the gradient of a part down; the event says when its memory is free."""
        assert self.gradient_VD is not None
        self.norms[number] = tensor_norm(gradient_RD)
        event = self._down.copy(self.gradient_VD[self.parts[number]], gradient_RD, [mark(self.device)])
        self._lowered[number] = event
        self.hosted = True
        return event

    def lower_whole(self, gradient_VD: Tensor) -> Any:
        """As `lower`, of all parts at once. The norm is taken as that of a gradient on the device."""
        assert self.gradient_VD is not None
        self.norms = {0: tensor_norm(gradient_VD)}
        event = self._down.copy(self.gradient_VD, gradient_VD, [mark(self.device)])
        self._lowered = [event] * len(self.parts)
        self.hosted = True
        return event

    def norm(self) -> Tensor:
        """The gradient's norm, once it was lowered or measured."""
        return joined(self.norms[number] for number in sorted(self.norms))

    def measure(self) -> None:
        """Takes the norms of a gradient that is not, or not only, on the host."""
        assert self.added is not None
        for number, rows in enumerate(self.parts):
            gradient_RD = self.added(rows)
            if self.hosted and self.gradient_VD is not None:
                wait(self.device, self._lowered[number])
                gradient_RD += self.gradient_VD[rows].to(self.device, non_blocking=True)
            self.norms[number] = tensor_norm(gradient_RD)

    def promise(self, factor: float) -> None:
        """The update is decided."""
        self._hyper, self._factor = self.updates.next(self.parameter), factor
        self._left = list(range(len(self.parts)))
        self.norms = {}

    def drop(self) -> None:
        """The step's gradient is not used."""
        self.added, self.hosted = None, False
        self.norms = {}

    def recover(self) -> None:
        """After a step that broke off, and once nothing runs on the device any more: its gradient is not used; what is left of
        an update that was promised before it stays pending, with that update's gradient."""
        self._last = None
        if not self.pending:
            self.drop()

    def flush(self) -> None:
        """Makes a pending update; then the host's bytes are whole."""
        if self.pending:
            for _ in self.passing():
                pass
        for event in self._lowered:
            if event is not None:
                event.synchronize()

    def _fetch(self, number: int, again: _Turn | None = None) -> _Turn:
        rows = self.parts[number]
        flat = slice(rows.start * self.weight_VD.shape[1], rows.stop * self.weight_VD.shape[1])
        wanted: dict[str, Tensor] = {"weight": self.weight_VD[rows]}
        if number in self._left:
            if self.hosted and self.gradient_VD is not None:
                wanted["gradient"] = self.gradient_VD[rows]
            wanted |= self.updates.cut(self.parameter, self.states, flat)
        turn = _Turn(wanted, self.device, again)
        pairs = [(turn.tensors[name], tensor) for name, tensor in wanted.items()]
        turn.ready = self._up.copies(pairs, [*turn.after, self._lowered[number]])
        return turn

    def _update(self, number: int, turn: _Turn) -> None:
        """Updates the part that is on the device, and sends it and its states down."""
        rows = self.parts[number]
        tensors = dict(turn.tensors)
        weight_RD = tensors.pop("weight")
        gradient_RD = tensors.pop("gradient", None)
        if self.added is not None:
            made_RD = self.added(rows)
            gradient_RD = made_RD if gradient_RD is None else made_RD.add_(gradient_RD)
        assert gradient_RD is not None
        if self._factor != 1.0:
            torch._foreach_mul_([gradient_RD], self._factor)
        start = rows.start * weight_RD.shape[1]
        part = Slice(weight_RD.view(-1), gradient_RD.view(-1), tensors, start)
        self.updates.update(self.parameter, self._hyper, part)
        flat = slice(start, rows.stop * weight_RD.shape[1])
        hosts = self.updates.cut(self.parameter, self.states, flat)
        pairs = [(self.weight_VD[rows], weight_RD), *((hosts[name], tensor) for name, tensor in tensors.items())]
        event = self._down.copies(pairs, [mark(self.device)])
        self._lowered[number] = event
        turn.busy.append(event)
        self._left.remove(number)

    def _pages(self, elements: int, dtype: torch.dtype) -> Tensor:
        return host_pages(elements * dtype.itemsize, self.device).view(dtype)


class _Turn:
    """Device memory of one part: its tensors by name, taken over from an earlier turn where there was one."""

    def __init__(self, like: dict[str, Tensor], device: torch.device, again: _Turn | None) -> None:
        sizes = {name: tensor.numel() * tensor.element_size() for name, tensor in like.items()}
        starts, total = {}, 0
        for name, size in sizes.items():
            starts[name] = total
            total += -(-size // 256) * 256
        self.after: list[Any] = []
        if again is not None and again.octets.numel() >= total:
            self.octets, self.after = again.octets, list(again.busy)
        else:
            for event in [] if again is None else again.busy:
                wait(device, event)
            self.octets = torch.empty(total, dtype=torch.uint8, device=device)
            self.after = [mark(device)]
        self.busy: list[Any] = []
        self.ready: Any = None
        self.tensors = {
            name: self.octets[starts[name] : starts[name] + sizes[name]].view(tensor.dtype).view(tensor.shape)
            for name, tensor in like.items()
        }
