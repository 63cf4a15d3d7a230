"""Activation offload: what blocks keep for backward waits in host memory, and comes back just before it is needed.

With checkpointing that is each block's input; without, every saved tensor of a block that is at least an eighth as large
as its input. Two side streams, one a direction, run beside the computation: while a block computes, its predecessor's
tensors leave in forward and return in backward, so that the tensors of at most two blocks are on their way. Streams are
ordered by events; the host never waits. The last block keeps its own: backward begins there. Bitwise: bytes are copied,
nothing is computed. On CPU tensors the copies are plain ones.

A saved tensor must not be changed in place between forward and backward (autograd's own check does not see parked ones).
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from finetune.memory.activations import boundary, saved_by_block, unsaved_by_first
from finetune.memory.case import Case, link_seconds
from finetune.memory.checkpointing import (
    Mode,
    attention_kept,
    kept_blocks,
    kept_bytes,
)
from finetune.memory.step_time import again_seconds, backward_seconds, forward_seconds, micro_batches, step_seconds
from finetune.memory.storage import place_of

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from finetune.contracts import Shape
    from finetune.memory.host import HostBuffer
    from finetune.memory.storage import Storage, Work

LARGE = 8
"""A saved tensor leaves if it has at least this part (1/LARGE) of its block's input's bytes."""
IN_FLIGHT = 2
"""Blocks whose tensors may be on the device while they leave or return."""
CONTENTION = 0.03
"""What copies beside the computation cost it in memory bandwidth and launches, as a share of a step. Assumed."""


def host_bytes(shape: Shape, storage: Storage, work: Work, mode: Mode) -> int:
    """Bytes of one micro-batch that wait on the host: of all blocks but the last."""
    whole = kept_blocks(shape.blocks - 1, mode)
    boundaries = (shape.blocks - 1 - whole) * work.tokens * boundary(shape, storage)
    if not whole:
        return boundaries
    large = saved_by_block(shape, storage, work) - work.tokens * _small(shape, storage)
    first = unsaved_by_first(shape, storage, work) - (4 * work.tokens if storage.stream == 4 else 0)
    return boundaries + whole * large - (max(0, first) if mode is False else 0)


def _small(shape: Shape, storage: Storage) -> int:
    """Bytes a token of saved tensors that are too small to leave: scales of norms, log-sums, the adapters' thin products."""
    smallest = boundary(shape, storage) / LARGE
    scales = [4, 4] + ([] if storage.eager else [4 * shape.heads])
    thin = [storage.compute * storage.rank] * len(storage.targets)
    if storage.fast:
        # Those of linears that share their input are one tensor.
        shared = Counter(place_of(linear, shape) for linear in shape.linears if linear.name in storage.targets)
        thin = [storage.compute * storage.rank * count for count in shared.values()]
    return sum(count for count in [*scales, *thin] if count < smallest)


def device_bytes(shape: Shape, storage: Storage, work: Work, mode: Mode, on: bool) -> int:
    """Bytes that all blocks keep on the device between forward and backward, at the most."""
    kept = kept_bytes(shape, storage, work, mode)
    if not on:
        return kept
    attention = (shape.blocks * attention_kept(shape, storage, work)) if mode == "selective" else 0
    # Without a GPU a copy is over when it is asked for: a block that leaves stands beside nothing but the last one's.
    near = min(shape.blocks, IN_FLIGHT + 1 if storage.device == "cuda" else 1)
    each = int(mode) if isinstance(mode, int) and mode > 1 else 1
    whole = min(kept_blocks(shape.blocks, mode), -(-near // each))
    small = work.tokens * _small(shape, storage) * (kept_blocks(shape.blocks, mode) - whole)
    own = whole * saved_by_block(shape, storage, work) + (near - whole) * work.tokens * boundary(shape, storage)
    return min(kept, attention + small + own)


def saves(case: Case) -> int:
    """Bytes of the step's peak on the device that the lever takes away."""
    mode = case.plan.activation_checkpointing
    kept = [device_bytes(case.shape, case.storage, case.work, mode, on) for on in (False, case.plan.activation_offload)]
    return kept[0] - kept[1]


def slowdown(case: Case) -> float:
    """The share of a step's time that the lever adds: what of the copies neither forward nor backward hides."""
    if not case.plan.activation_offload:
        return 0.0
    shape, storage, work = case.shape, case.storage, case.work
    copy = link_seconds(case, host_bytes(shape, storage, work, case.plan.activation_checkpointing))
    forward, backward = forward_seconds(case), backward_seconds(case)
    if case.plan.activation_checkpointing is True:
        backward += again_seconds(case)
    waited = max(0.0, copy - forward) + max(0.0, copy - backward)
    return micro_batches(case) * waited / step_seconds(case) + CONTENTION


class _Parked:
    """A span of memory: on the host and, once asked for, on the device again, as a tensor of one dimension."""

    def __init__(self, flat_N: Tensor, buffer: HostBuffer) -> None:
        self.count, self.dtype, self.device = flat_N.numel(), flat_N.dtype, flat_N.device
        self.buffer = buffer
        self.back_N: Tensor | None = None
        self.ready: torch.cuda.Event | None = None


@dataclass(frozen=True)
class _View:
    """One saved tensor: a parked span and the layout in it. Several views of the same memory share a span."""

    parked: _Parked
    shape: torch.Size
    strides: tuple[int, ...]


class _Stay:
    """One block's forward, and what of it is parked."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.parked: list[weakref.ref[_Parked]] = []
        self.leaving: list[Tensor] = []
        self.seen: dict[tuple[Any, ...], _Parked] = {}
        self.left: torch.cuda.Event | None = None
        self.asked = False


class Offload:
    """The lever of one model on one device. `pool.bytes` is what it holds of the host; `parked` what is there now."""

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        import torch

        from finetune.memory.host import HostPool

        self.pool = HostPool(device)
        self.parked = 0
        self.device = device
        self._own = {tensor.untyped_storage().data_ptr() for tensor in [*module.parameters(), *module.buffers()]}
        self._stays: list[_Stay] = []
        cuda = device.type == "cuda"
        self._down = torch.cuda.Stream(device) if cuda else None
        self._up = torch.cuda.Stream(device) if cuda else None

    def place(self, index: int, blocks: int) -> Callable[..., Any] | None:
        """The context for the forward of block `index`, of its function and inputs; None for the last block."""
        return None if index == blocks - 1 else partial(self._block, index)

    @contextmanager
    def _block(self, index: int, function: Callable[..., Any], inputs: tuple[Any, ...]) -> Iterator[None]:
        import torch

        if index == 0:
            self._stays.clear()
        stay = _Stay(index)
        self._stays.append(stay)
        shared = self._own | {t.untyped_storage().data_ptr() for t in _tensors(getattr(function, "keywords", {}))}
        smallest = -(-inputs[0].numel() * inputs[0].element_size() // LARGE)
        pack = partial(self._pack, stay, shared, smallest)
        with torch.autograd.graph.saved_tensors_hooks(pack, partial(self._unpack, stay)):
            yield
        self._depart(stay)

    def _pack(self, stay: _Stay, shared: set[int], smallest: int, tensor: Tensor) -> Tensor | _View:
        count = tensor.numel() * tensor.element_size()
        if count < smallest or tensor.device != self.device or tensor.untyped_storage().data_ptr() in shared:
            return tensor
        dense = _dense(tensor)
        what = (tensor.data_ptr(), count, tensor.dtype)
        parked = stay.seen.get(what) if dense else None
        if not dense:
            # A view with gaps or repeats: its values leave, in their own order.
            tensor = tensor.contiguous()
        if parked is None:
            parked = self._park(stay, tensor.detach(), count)
            if dense:
                stay.seen[what] = parked
        return _View(parked, tensor.shape, tensor.stride())

    def _park(self, stay: _Stay, tensor: Tensor, count: int) -> _Parked:
        flat_N = tensor.as_strided((tensor.numel(),), (1,))
        parked = _Parked(flat_N, self.pool.take((stay.index, len(stay.parked)), count))
        self._send(flat_N, parked)
        # Held until the copy is over, so that neither its bytes nor its address go to another tensor meanwhile.
        stay.leaving.append(flat_N)
        stay.parked.append(weakref.ref(parked))
        self.parked += count
        weakref.finalize(parked, self._gone, parked.buffer, count)
        return parked

    def _send(self, flat_N: Tensor, parked: _Parked) -> None:
        import torch

        target_N = parked.buffer.view(flat_N.shape, flat_N.dtype)
        if self._down is None:
            target_N.copy_(flat_N)
            return
        self._down.wait_stream(torch.cuda.current_stream(self.device))
        if parked.buffer.busy is not None:
            self._down.wait_event(parked.buffer.busy)
        with torch.cuda.stream(self._down):
            target_N.copy_(flat_N, non_blocking=True)
            parked.buffer.busy = self._down.record_event()

    def _depart(self, stay: _Stay) -> None:
        """After a block's forward: its tensors may go once they have left; the computation waits for those of two blocks ago."""
        stay.seen.clear()
        if self._down is None:
            stay.leaving.clear()
            return
        stay.left = self._down.record_event()
        for earlier in self._stays[:-IN_FLIGHT]:
            self._release(earlier)

    def _release(self, stay: _Stay) -> None:
        import torch

        if stay.leaving and stay.left is not None:
            torch.cuda.current_stream(self.device).wait_event(stay.left)
            stay.leaving.clear()

    def _unpack(self, stay: _Stay, view: Tensor | _View) -> Tensor:
        if not isinstance(view, _View):
            return view
        if not stay.asked and self._up is not None:
            stay.asked = True
            for waiting in self._stays:
                self._release(waiting)
            self._bring(stay)
            if stay.index:
                self._bring(self._stays[stay.index - 1])
        parked = view.parked
        back_N = self._fetch(parked) if parked.back_N is None else parked.back_N
        if parked.ready is not None:
            import torch

            torch.cuda.current_stream(self.device).wait_event(parked.ready)
        return back_N.as_strided(view.shape, view.strides)

    def _bring(self, stay: _Stay) -> None:
        """Starts bringing a block's tensors back."""
        for reference in stay.parked:
            parked = reference()
            if parked is not None and parked.back_N is None:
                self._fetch(parked)

    def _fetch(self, parked: _Parked) -> Tensor:
        import torch

        back_N = torch.empty(parked.count, dtype=parked.dtype, device=parked.device)
        source_N = parked.buffer.view(back_N.shape, parked.dtype)
        parked.back_N = back_N
        if self._up is None:
            back_N.copy_(source_N)
            return back_N
        # What stood in this memory before must be over, and so must the way out.
        self._up.wait_stream(torch.cuda.current_stream(self.device))
        if parked.buffer.busy is not None:
            self._up.wait_event(parked.buffer.busy)
        with torch.cuda.stream(self._up):
            back_N.copy_(source_N, non_blocking=True)
            parked.ready = parked.buffer.busy = self._up.record_event()
        return back_N

    def _gone(self, buffer: HostBuffer, count: int) -> None:
        """A span that nobody needs any more. Runs before its device memory is freed, so that what was brought and never
        asked for is not overwritten on its way."""
        if buffer.busy is not None:
            import torch

            torch.cuda.current_stream(self.device).wait_event(buffer.busy)
        self.parked -= count
        self.pool.give(buffer)


def _dense(tensor: Tensor) -> bool:
    """Whether a tensor's elements fill one span of memory, in any order of dimensions."""
    filled = 1
    for stride, size in sorted(pair for pair in zip(tensor.stride(), tensor.shape, strict=True) if pair[1] != 1):
        if stride != filled:
            return False
        filled *= size
    return True


def _tensors(values: Any) -> Iterator[Tensor]:
    """Tensors among a block's named inputs (rotary tables, masks): all blocks share them, and the model holds them."""
    if isinstance(values, dict):
        values = list(values.values())
    if isinstance(values, (list, tuple)):
        for value in values:
            yield from _tensors(value)
    elif hasattr(values, "untyped_storage"):
        yield values
