"""Host memory that a GPU copies from and to without waiting: plain pages, registered with the driver.

torch's own pinned allocator rounds every request up to a power of two, so 33 GiB of state would take 64. Anonymous pages
(mmap) are exactly as large as asked, begin at a page, and are registered once; whoever takes a buffer gives it back
when its bytes are no longer needed, and gets the same pages the next time. Nothing is allocated in a steady state. For
a CPU the same pages, not registered.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import resource
import sys
from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from finetune.errors import NothingFitsError


@dataclass
class HostBuffer:
    """Bytes on the host: `pages` uint8 [N]. `busy` is the GPU's last use, which the next use on a stream waits for."""

    pages: Tensor
    place: Hashable = None
    busy: torch.cuda.Event | None = None

    def view(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """The buffer's beginning as a dense tensor."""
        count = math.prod(shape) * dtype.itemsize
        return self.pages[:count].view(dtype).view(torch.Size(shape))


class _Pages(mmap.mmap):
    """Anonymous pages. Registered ones leave the driver's table before they go back to the system: `__del__` runs before
    the mapping ends, a weak reference's callback after it. At the end of the process both are gone anyway."""

    registered: int | None = None

    def __del__(self) -> None:
        if self.registered is not None and not sys.is_finalizing():
            torch.cuda.cudart().cudaHostUnregister(self.registered)


def host_pages(count: int, device: torch.device) -> Tensor:
    """uint8 [count] in pages of its own, registered when `device` is a GPU. NothingFitsError when the driver refuses."""
    try:
        pages = _Pages(-1, max(count, 1))
    except OSError as error:
        raise NothingFitsError(
            f"the system refused {count:,} bytes of host memory ({error.strerror}); {limits()}",
            "plan.host_memory",
            "free host memory, or switch off the plan's host placements",
        ) from error
    octets_N = torch.frombuffer(pages, dtype=torch.uint8)[:count]
    if device.type == "cuda":
        _register(octets_N.data_ptr(), max(count, 1))
        pages.registered = octets_N.data_ptr()
    return octets_N


def _register(address: int, count: int) -> None:
    code = int(torch.cuda.cudart().cudaHostRegister(address, count, 0))
    if code != 0:
        raise NothingFitsError(
            f"the driver refused to pin {count:,} bytes of host memory (code {code}); {limits()}",
            "plan.host_memory",
            "raise the limit of locked memory (ulimit -l), or switch off the plan's host placements",
        )


MMAP_THRESHOLD, LARGE, USUAL = -3, 2**17, 32 * 2**20
"""Of mallopt: the parameter, the size from which tensors get pages of their own, and where glibc's own rule ends up."""


def large_tensors_apart(apart: bool) -> None:
    """Whether large ordinary tensors get pages of their own, which go back to the system when they are freed (glibc).

    While a model is packed and gets its adapters, short-lived large tensors and small ones that stay take turns: in one
    heap that leaves holes, which add up to the whole unpacked model. Afterwards tensors of a step are better reused.
    """
    set_option = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if set_option is not None:
        set_option(MMAP_THRESHOLD, LARGE if apart else USUAL)


def gib(count: float) -> str:
    """Bytes in GiB, or MiB where that says more."""
    return f"{count / 2**30:.2f} GiB" if count >= 2**28 else f"{count / 2**20:.1f} MiB"


def limits() -> str:
    """What bounds this process's host memory, in words: what it holds, what the system has left, what may be locked."""
    held = _field("/proc/self/status", "RssAnon") + _field("/proc/self/status", "RssShmem")
    left = _field("/proc/meminfo", "MemAvailable")
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    allowed = "unlimited" if locked == resource.RLIM_INFINITY else gib(locked)
    return f"this process holds {gib(held)}, the system has {gib(left)} left, `ulimit -l` allows {allowed}"


def _field(path: str, name: str) -> int:
    """A row of a /proc file in bytes; 0 where the system does not tell."""
    try:
        rows = Path(path).read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return 0
    return next((int(row.split()[1]) * 1024 for row in rows if row.startswith(f"{name}:")), 0)


class HostPool:
    """Buffers by place (any key): a place takes the same pages again, or larger ones once it needs more.

    `bytes` is what all places hold now, which the plan counts.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.bytes = 0
        self._free: dict[Hashable, list[HostBuffer]] = defaultdict(list)

    def take(self, place: Hashable, count: int) -> HostBuffer:
        """A buffer of at least `count` bytes; new pages only when none of this place is free or large enough."""
        free = self._free[place]
        if free and free[-1].pages.numel() >= count:
            return free.pop()
        if free:
            small = free.pop()
            if small.busy is not None:
                small.busy.synchronize()
            self.bytes -= small.pages.numel()
        self.bytes += count
        return HostBuffer(host_pages(count, self.device), place)

    def give(self, buffer: HostBuffer) -> None:
        self._free[buffer.place].append(buffer)
