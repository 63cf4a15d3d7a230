"""Measured memory: what this process took on the GPU and on the host."""

from __future__ import annotations

import gc
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch


def clear(device: torch.device) -> None:
    """Frees what an earlier run in this process left on the GPU (its objects have cycles), and lifts that run's cap."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(1.0, device)


def reset_peak(device: torch.device) -> None:
    """Starts the GPU's peak counter anew; the host's cannot be."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def cap(device: torch.device, count: int) -> None:
    """The most bytes that torch's allocator may hold on `device` from now on: past them it raises out-of-memory."""
    whole = torch.cuda.mem_get_info(device)[1]
    torch.cuda.set_per_process_memory_fraction(min(1.0, max(0.0, count / whole)), device)


def tidy(device: torch.device) -> None:
    """Gives memory that no tensor holds back to the GPU (after loading, whose sizes do not come again)."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def peak_gpu_bytes(device: torch.device) -> int:
    """The most bytes that tensors held on `device` since the last reset; 0 without a GPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


def reserved_gpu_bytes(device: torch.device) -> int:
    """The most bytes that torch's allocator held on `device` since the last reset; 0 without a GPU."""
    return torch.cuda.max_memory_reserved(device) if device.type == "cuda" else 0


def host_bytes() -> int:
    """Resident bytes of this process now (its peak where the system does not tell)."""
    statm = Path("/proc/self/statm")
    if statm.exists():
        return int(statm.read_text().split()[1]) * resource.getpagesize()
    return peak_host_bytes()


def peak_host_bytes() -> int:
    """The most resident bytes that this process ever had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def shown_bytes(device: torch.device) -> int:
    """The figure beside the progress bar: GPU peak on a GPU, resident bytes on a CPU."""
    return peak_gpu_bytes(device) if device.type == "cuda" else host_bytes()


class Peaks:
    """The most bytes that tensors held on the GPU in each phase of a run (load, resume, step, evaluate ...); nothing on a CPU.

    A phase within another, as an evaluation between two steps, counts for itself alone.
    """

    def __init__(
        self,
        device: torch.device | None = None,
        peak: Callable[[torch.device], int] = peak_gpu_bytes,
        reset: Callable[[torch.device], None] = reset_peak,
    ) -> None:
        self.device = device or torch.device("cpu")
        self._peak, self._reset = peak, reset
        self._most: dict[str, int] = {}
        self._reserved = 0
        self.phase = "load"

    def enter(self, phase: str) -> None:
        """From now on bytes count for `phase`."""
        self._most[self.phase] = self.of(self.phase)
        self._reserved = self.reserved
        self._reset(self.device)
        self.phase = phase

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Inside, bytes count for `phase`."""
        before = self.phase
        self.enter(phase)
        try:
            yield
        finally:
            self.enter(before)

    def of(self, phase: str) -> int:
        """The peak of a phase so far; 0 for one that was not."""
        now = self._peak(self.device) if phase == self.phase else 0
        return max(self._most.get(phase, 0), now)

    @property
    def all(self) -> dict[str, int]:
        """The peaks by phase, those that took nothing left out."""
        found = {phase: self.of(phase) for phase in {**self._most, self.phase: 0}}
        return {phase: most for phase, most in found.items() if most}

    @property
    def reserved(self) -> int:
        """The most bytes that torch's allocator held, in any phase."""
        return max(self._reserved, reserved_gpu_bytes(self.device))
