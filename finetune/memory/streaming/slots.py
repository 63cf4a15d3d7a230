"""Slots: a few buffers on the device, each holding one block's weights in its turn; the next are fetched meanwhile.

The order of use is known for a pass (0 to L-1 and back), so a block is fetched as soon as a slot holds nothing that is
needed sooner. At the turn the last blocks are still there. A slot is overwritten only after the event of its last reader
and of its last way down. Blocks that are resident keep their weights on the device and never move.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from finetune.memory.streaming.flat import Flat
from finetune.memory.streaming.lanes import Lane, mark, wait


class _Slot:
    """One buffer: which block's bytes it holds, when they are whole, and what must be over before it is overwritten."""

    def __init__(self, octets: Tensor) -> None:
        self.octets = octets
        self.holds: int | None = None
        self.ready: Any = None
        self.busy: list[Any] = []


class Slots:
    """`count` slots for the blocks `flats`; those of `resident` have a buffer of their own.

    Memory is taken at the first use. `fetched` counts the bytes that went up, for tests and the log.
    """

    def __init__(
        self, flats: Sequence[Flat], count: int, device: torch.device, resident: frozenset[int] = frozenset()
    ) -> None:
        self.flats = list(flats)
        self.device = device
        self.count = count
        self.resident = resident
        self.fetched = 0
        self.up = Lane(device)
        self.down = Lane(device)
        self._slots: list[_Slot] = []
        self._own: dict[int, _Slot] = {}
        self._lowered: list[Any] = [None] * len(self.flats)
        self._order: list[int] = []
        self._place = 0

    @property
    def bytes(self) -> int:
        """Device bytes of all slots and resident blocks."""
        moving = [flat.bytes for number, flat in enumerate(self.flats) if number not in self.resident]
        own = sum(self.flats[number].bytes for number in self.resident)
        return min(self.count, len(moving)) * max(moving, default=0) + own

    def begin(self, order: Sequence[int]) -> None:
        """Says in which order blocks will be used, and starts to fetch the first ones."""
        self._order, self._place = list(order), 0
        self._take_memory()
        self._fetch_ahead()

    @contextmanager
    def using(self, number: int) -> Iterator[Tensor]:
        """Inside, block `number`, the next in order, is bound to the device; gives its bytes there."""
        if self._place >= len(self._order) or self._order[self._place] != number:
            # A use that nobody announced (evaluation through the model class): the blocks after it are likely next.
            self.begin([*range(number, len(self.flats))])
        self._fetch_ahead()
        slot = self._slot_of(number)
        assert slot is not None
        wait(self.device, slot.ready)
        self.flats[number].bind(slot.octets)
        try:
            yield slot.octets
        except BaseException:
            # An update may have broken off half-way: the host's bytes, which are those before it, are fetched anew.
            slot.holds = None
            raise
        finally:
            self.flats[number].release()
            slot.busy.append(mark(self.device))
            self._place += 1

    def lower(self, number: int) -> None:
        """Starts the way down of a block whose bytes on the device were changed; the host's copy is whole once it is over."""
        slot = self._slot_of(number)
        assert slot is not None
        flat = self.flats[number]
        event = self.down.copy(flat.host, slot.octets[: flat.bytes], [mark(self.device), self._lowered[number]])
        slot.busy.append(event)
        self._lowered[number] = event

    def settle(self) -> None:
        """Returns when every way down is over, so that the host's bytes may be read."""
        for event in self._lowered:
            if event is not None:
                event.synchronize()

    def forget(self) -> None:
        """The host's bytes were changed: what slots hold is stale."""
        for slot in (*self._slots, *self._own.values()):
            slot.holds = None

    def lend(self, keep: int) -> None:
        """Frees every slot but that of block `keep` for something else, until `take_back`: the blocks in them are fetched again."""
        for slot in self._slots:
            if slot.holds != keep:
                for event in (slot.ready, *slot.busy):
                    wait(self.device, event)
                for flat in self.flats:
                    flat.forget(slot.octets)
        self._slots = [slot for slot in self._slots if slot.holds == keep]

    def take_back(self) -> None:
        """Ends `lend`, and starts to fetch what is used next."""
        self._take_memory()
        self._fetch_ahead()

    def _take_memory(self) -> None:
        moving = [flat.bytes for number, flat in enumerate(self.flats) if number not in self.resident]
        while len(self._slots) < min(self.count, len(moving)):
            self._slots.append(self._slot(max(moving)))
        for number in sorted(self.resident - self._own.keys()):
            self._own[number] = self._slot(self.flats[number].bytes)

    def _slot(self, count: int) -> _Slot:
        slot = _Slot(torch.empty(count, dtype=torch.uint8, device=self.device))
        # The memory may have had another use before, which the lane does not know of.
        slot.busy.append(mark(self.device))
        return slot

    def _slot_of(self, number: int) -> _Slot | None:
        if number in self.resident:
            return self._own[number]
        return next((slot for slot in self._slots if slot.holds == number), None)

    def _fetch_ahead(self) -> None:
        """Fetches the blocks that are used next, as many as there are slots for."""
        needed: list[int] = []
        for number in self._order[self._place :]:
            if number in self.resident:
                if self._own[number].holds is None:
                    self._fetch(self._own[number], number)
                continue
            if number not in needed:
                needed.append(number)
            if len(needed) == len(self._slots):
                break
        for number in needed:
            if self._slot_of(number) is None:
                self._fetch(next(slot for slot in self._slots if slot.holds not in needed), number)

    def _fetch(self, slot: _Slot, number: int) -> None:
        flat = self.flats[number]
        slot.holds = number
        slot.ready = self.up.copy(slot.octets[: flat.bytes], flat.host, [*slot.busy, self._lowered[number]])
        slot.busy = []
        self.fetched += flat.bytes
