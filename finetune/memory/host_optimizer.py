"""Optimizer state on the host: it passes through the device in chunks of parameters during the update.

Two moments in fp32 are twice the weights; on the host they cost none of the device's memory but two chunks, and a trip
up and down a step. The update itself runs on the device, with the optimizer's own code, so the bits are the same: the
optimizer sees ordinary state tensors of the few parameters that it is asked to step. While one chunk is updated, the
next comes up and the one before goes down, on a stream each, ordered by events. It works for every optimizer whose state
is tensors by parameter. On CPU tensors the same steps are plain copies.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from finetune.memory.case import Case, link_seconds
from finetune.memory.step_time import step_seconds

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from torch.optim import Optimizer

SMALL_PARAMETER = 4096
"""Parameters with fewer elements keep their state on the device: a copy would cost more than it frees."""
SMALL_STATE = 512
"""State tensors of fewer elements (step counts, code tables) stay where the optimizer put them."""
CHUNK_BYTES = 256 * 2**20
"""State that passes through the device at a time; a single parameter's may be more."""


def hosted_bytes(case: Case) -> int:
    """Bytes of optimizer state that the lever keeps on the host."""
    return sum(each.count * each.state for each in case.tensors if each.elements >= SMALL_PARAMETER)


def passing_bytes(case: Case) -> int:
    """The most state that is on the device at once while it passes: two chunks; one parameter's, updated in backward."""
    largest = max((each.state for each in case.tensors), default=0)
    if case.plan.optimizer_in_backward:
        return largest
    return min(2 * max(largest, min(CHUNK_BYTES, case.state)), case.state)


def saves(case: Case) -> int:
    """Bytes of the device that the lever frees, outside the update."""
    return hosted_bytes(case) if case.plan.optimizer_placement == "host" else 0


def slowdown(case: Case) -> float:
    """The share of a step's time that the lever adds: up and down run side by side, after the backward."""
    if case.plan.optimizer_placement != "host":
        return 0.0
    return link_seconds(case, hosted_bytes(case)) / step_seconds(case)


def step_only(optimizer: Optimizer, parameters: Sequence[nn.Parameter]) -> None:
    """The optimizer's step for these parameters alone, as its own code does it: the others' gradients are hidden meanwhile.

    Every optimizer leaves a parameter without a gradient alone, whatever it keeps beside its groups.
    """
    wanted = {id(parameter) for parameter in parameters}
    others = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in wanted]
    hidden = [(parameter, parameter.grad) for parameter in others if parameter.grad is not None]
    for parameter, _ in hidden:
        parameter.grad = None
    try:
        optimizer.step()
    finally:
        for parameter, gradient in hidden:
            parameter.grad = gradient


def belongs_on_host(parameter: nn.Parameter, value: Any) -> bool:
    """Whether a value of the parameter's state is one that the lever keeps on the host."""
    import torch

    return isinstance(value, torch.Tensor) and parameter.numel() >= SMALL_PARAMETER and value.numel() >= SMALL_STATE


class _Place:
    """One parameter's state tensors: their bytes on the host."""

    def __init__(self, tensors: dict[str, Tensor], device: torch.device) -> None:
        from finetune.memory.host import host_pages

        self.hosted: dict[str, Tensor] = {}
        for key, tensor in tensors.items():
            pages = host_pages(tensor.numel() * tensor.element_size(), device)
            self.hosted[key] = pages.view(tensor.dtype).view(tensor.shape)


class HostStates:
    """Keeps an optimizer's state on the host between updates. `optimizer.state` then holds the host's tensors, so saving
    needs no more than on the device. `bytes`: what is there.

    The first update of a parameter makes its state on the device, as the optimizer does; from then on it lives here.
    """

    def __init__(self, optimizer: Optimizer, device: torch.device, chunk_bytes: int = CHUNK_BYTES) -> None:
        import torch

        self.optimizer = optimizer
        self.device = device
        self.chunk_bytes = chunk_bytes
        self._places: dict[nn.Parameter, _Place] = {}
        self._leaving: list[tuple[torch.cuda.Event | None, list[Tensor]]] = []
        cuda = device.type == "cuda"
        self._down = torch.cuda.Stream(device) if cuda else None
        self._up = torch.cuda.Stream(device) if cuda else None

    @property
    def bytes(self) -> int:
        return sum(t.numel() * t.element_size() for place in self._places.values() for t in place.hosted.values())

    def settle(self) -> None:
        """Takes all state into the host's own pages (after a resume, which leaves it in ordinary ones)."""
        for parameter in self._parameters():
            self._lower([parameter])
        self._let_go()

    def step(self) -> None:
        """One update of every parameter that has a gradient."""
        chunks = list(self._chunks(p for p in self._parameters() if p.grad is not None))
        coming = self._raise(chunks[0]) if chunks else None
        for index, chunk in enumerate(chunks):
            self._arrive(coming)
            coming = self._raise(chunks[index + 1]) if index + 1 < len(chunks) else None
            step_only(self.optimizer, chunk)
            self._lower(chunk)
        self._let_go()

    def update(self, parameters: Sequence[nn.Parameter]) -> None:
        """One update of these parameters."""
        self._arrive(self._raise(parameters))
        step_only(self.optimizer, parameters)
        self._lower(parameters)

    def _parameters(self) -> Iterable[nn.Parameter]:
        return (parameter for group in self.optimizer.param_groups for parameter in group["params"])

    def _chunks(self, parameters: Iterable[nn.Parameter]) -> Iterable[list[nn.Parameter]]:
        """Parameters in the optimizer's order, cut where their state (or, before there is any, 8 bytes an element) exceeds
        a chunk."""
        chunk: list[nn.Parameter] = []
        total = 0
        for parameter in parameters:
            place = self._places.get(parameter)
            hosted = place.hosted.values() if place else ()
            count = sum(t.numel() * t.element_size() for t in hosted) or 8 * parameter.numel()
            if chunk and total + count > self.chunk_bytes:
                yield chunk
                chunk, total = [], 0
            chunk.append(parameter)
            total += count
        if chunk:
            yield chunk

    def _raise(self, parameters: Sequence[nn.Parameter]) -> torch.cuda.Event | None:
        """Starts bringing the parameters' state up; the event says when it is there."""
        import torch

        self._let_go()
        places = [(self.optimizer.state[p], self._places[p]) for p in parameters if p in self._places]
        if self._up is None:
            for state, place in places:
                state.update({key: tensor.clone() for key, tensor in place.hosted.items()})
            return None
        fresh = [
            (state, key, tensor, torch.empty_like(tensor, device=self.device))
            for state, place in places
            for key, tensor in place.hosted.items()
        ]
        # What stood in this memory before must be over, and the last way down of the same state too.
        self._up.wait_stream(torch.cuda.current_stream(self.device))
        assert self._down is not None
        self._up.wait_stream(self._down)
        with torch.cuda.stream(self._up):
            for state, key, tensor, above in fresh:
                above.copy_(tensor, non_blocking=True)
                state[key] = above
        return self._up.record_event()

    def _arrive(self, event: torch.cuda.Event | None) -> None:
        import torch

        if event is not None:
            torch.cuda.current_stream(self.device).wait_event(event)

    def _lower(self, parameters: Sequence[nn.Parameter]) -> None:
        """Starts taking the parameters' state down, and puts the host's tensors in its place."""
        import torch

        if self._down is not None:
            self._down.wait_stream(torch.cuda.current_stream(self.device))
        gone: list[Tensor] = []
        for parameter in parameters:
            state: dict[str, Any] = self.optimizer.state.get(parameter, {})
            above = {key: value for key, value in state.items() if self._is_large(parameter, key, value)}
            if not above:
                continue
            place = self._places.get(parameter)
            if place is None or place.hosted.keys() != above.keys():
                place = self._places[parameter] = _Place(above, self.device)
            for key, tensor in above.items():
                self._copy_down(place.hosted[key], tensor)
                state[key] = place.hosted[key]
                gone.append(tensor)
        self._leaving.append((self._down.record_event() if self._down is not None else None, gone))

    def _is_large(self, parameter: nn.Parameter, key: str, value: Any) -> bool:
        place = self._places.get(parameter)
        already = place is not None and value is place.hosted.get(key)
        return belongs_on_host(parameter, value) and not already

    def _copy_down(self, hosted: Tensor, tensor: Tensor) -> None:
        import torch

        if self._down is None:
            hosted.copy_(tensor)
            return
        with torch.cuda.stream(self._down):
            hosted.copy_(tensor, non_blocking=True)

    def _let_go(self) -> None:
        """Frees what is on its way down, once the computation is told to wait for it."""
        for event, tensors in self._leaving:
            self._arrive(event)
            tensors.clear()
        self._leaving.clear()

    def end(self) -> None:
        """After the last update of a step: what is on its way down does not stand until the next one."""
        self._let_go()

    def wait(self) -> None:
        """Returns when the host's bytes are whole: call it before they are read (a checkpoint)."""
        if self._down is not None:
            self._down.synchronize()
