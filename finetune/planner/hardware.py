"""What the machine has: free memory of one GPU and of the host, counted as a process may really take it.

Free, not total; and in a container the cgroup's limit, not the host's. A pretend machine (`hardware=1x24GB,64GB`) is
the same value made from text, so a plan can be made for a machine that is not here.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from pathlib import Path

from finetune.errors import InputError
from finetune.machine.rates import ASSUMED, CPU, ROWS, Rates, row_of

GIB = 2**30
CONTEXT_BYTES = 940 * 2**20
"""What a process takes on a GPU beside what torch's allocator holds: on an H200 620 MiB of context, 65 of cuBLAS, and the rest
for Triton's kernels and for streams; 866 (LoRA) and 941 MiB (full) in whole streamed runs (benchmarks/results/rehearsal.jsonl).
Smaller cards have smaller contexts, so there it is on the safe side."""
UNITS = {"KIB": 2**10, "MIB": 2**20, "GIB": GIB, "TIB": 2**40, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
EXAMPLES = "1x24GB,64GB (GPUs x memory of each, host memory), 8x80GB, 0,32GB (no GPU)"


@dataclass(frozen=True)
class Hardware:
    """A machine. `gpu_bytes` is what a process may still take of one GPU (0 on a CPU), its own context included;
    `host_bytes` what all processes together may still take of the host; `bf16`: the GPU computes in it; `rates`: how fast it is."""

    device: str
    name: str
    gpus: int
    gpu_bytes: int
    host_bytes: int
    cores: int
    bf16: bool = True
    rates: Rates | None = None


PRESETS: dict[str, Hardware] = {
    "rtx4090-24": Hardware("cuda", "RTX 4090, 24 GiB", 1, int(23.5 * GIB), 64 * GIB, 16, rates=ROWS["rtx4090-24"]),
    "a100-80": Hardware("cuda", "A100, 80 GiB", 1, int(79.1 * GIB), 128 * GIB, 32, rates=ROWS["a100-80"]),
    "h100-80": Hardware("cuda", "H100, 80 GiB", 1, int(79.1 * GIB), 192 * GIB, 32, rates=ROWS["h100-80"]),
    "h200-141": Hardware("cuda", "H200, 141 GB", 1, int(139.7 * GIB), 256 * GIB, 32, rates=ROWS["h200-141"]),
    "cpu": Hardware("cpu", "a CPU", 0, 0, 16 * GIB, 8, rates=CPU),
}
"""Pretend machines by name; the memory is what such a card has free for one process."""


def parse(text: str) -> Hardware:
    """A pretend machine: a preset's name (`h100-80`, `8xh100-80`), or `GPUSxMEMORY,HOST` such as `1x24GB,64GB`.

    GB is 10^9 bytes and GiB 2^30. Host memory not given is taken as twice that of the GPUs (a preset's own, a GPU).
    InputError with examples for anything else.
    """
    parts = [part.strip() for part in text.strip().split(",")]
    if len(parts) > 2 or not parts[0]:
        raise _bad(text)
    machine = _machine(parts[0], text)
    host = _size(parts[1], text) if len(parts) == 2 else machine.host_bytes
    if host <= 0:
        raise InputError(f"'{text}' gives no host memory", "hardware", f"for instance {EXAMPLES}")
    return replace(machine, host_bytes=host, name=text.strip() if machine.name == "" else machine.name)


def _machine(part: str, text: str) -> Hardware:
    if part in PRESETS:
        return PRESETS[part]
    if part == "0":
        return Hardware("cpu", "", 0, 0, 0, 8, rates=CPU)
    match = re.fullmatch(r"(\d+)\s*[xX]\s*(\S.*)", part)
    if match is None:
        raise _bad(text)
    count, rest = int(match[1]), match[2]
    if rest in PRESETS and PRESETS[rest].device == "cuda" and count:
        one = PRESETS[rest]
        return replace(one, name=f"{count} x {one.name}", gpus=count, host_bytes=count * one.host_bytes)
    size = _size(rest, text)
    if count == 0 or size == 0:
        return Hardware("cpu", "", 0, 0, 0, 8, rates=CPU)
    return Hardware("cuda", "", count, size, 2 * count * size, 16 * count, rates=ASSUMED["cuda"])


def _size(part: str, text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]i?B)", part, re.IGNORECASE)
    if match is None:
        raise _bad(text)
    return int(float(match[1]) * UNITS[match[2].upper()])


def _bad(text: str) -> InputError:
    presets = ", ".join(PRESETS)
    return InputError(f"'{text}' is not a machine", "hardware", f"give {EXAMPLES}, or one of {presets}")


def detect(device: str = "auto") -> Hardware:
    """This machine, for `device` auto, cpu or cuda. InputError when a GPU is asked for and there is none.

    Asks the current GPU only (asking another would make a context on it), so call it once the process has its GPU.
    """
    # What this process has taken already is its own to use, and the planner counts the whole process.
    host, cores = host_free() + own_bytes(), _cores()
    if device == "cpu":
        return Hardware("cpu", "this CPU", 0, 0, host, cores, rates=CPU)
    import torch

    if not torch.cuda.is_available():
        if device == "cuda":
            raise InputError("there is no GPU that torch can use", "device", "device=cpu, or install torch with CUDA")
        return Hardware("cpu", "this CPU", 0, 0, host, cores, rates=CPU)
    free, _ = torch.cuda.mem_get_info()
    # Asking made this process's context, which is its own to use.
    ours = torch.cuda.memory_reserved() + CONTEXT_BYTES
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    usable = min(free + ours, properties.total_memory)
    bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
    return Hardware(
        "cuda", properties.name, torch.cuda.device_count(), usable, host, cores, bf16, row_of(properties.name)
    )


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def host_free(root: Path = Path("/")) -> int:
    """Bytes of host memory that this process may still take: the least of the system's and its cgroups' (v1 and v2).

    `root` is where /proc and /sys are found. Without /proc, half of the physical memory.
    """
    limits = [_available(root), *_cgroup_v2(root), *_cgroup_v1(root)]
    known = [limit for limit in limits if limit is not None]
    if known:
        return max(0, min(known))
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def own_bytes(root: Path = Path("/")) -> int:
    """Host memory that this process holds and that nothing would give back without it: its pages without a file. 0 where
    the system does not tell."""
    match = re.search(r"^RssAnon:\s+(\d+) kB", _read(root / "proc/self/status"), re.MULTILINE)
    return int(match[1]) * 1024 if match else 0


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""


def _available(root: Path) -> int | None:
    match = re.search(r"^MemAvailable:\s+(\d+) kB", _read(root / "proc/meminfo"), re.MULTILINE)
    return int(match[1]) * 1024 if match else None


def _room(limit: str, used: str, statistics: str, reclaimable: str) -> int | None:
    """A cgroup's room: its limit less what is used, file pages that the kernel would give back not counted."""
    if not limit.strip().isdigit() or int(limit) >= 2**60:
        return None
    match = re.search(rf"^{reclaimable} (\d+)$", statistics, re.MULTILINE)
    taken = int(used) if used.strip().isdigit() else 0
    return int(limit) - max(0, taken - (int(match[1]) if match else 0))


def _folders(root: Path, mount: str, pattern: str) -> list[Path]:
    """The cgroup's folder and those above it; in a container its own path may not be visible, the mount's root is."""
    match = re.search(pattern, _read(root / "proc/self/cgroup"), re.MULTILINE)
    base = root / mount
    inner = base / match[1].strip("/") if match else base
    folders = [inner, *inner.parents]
    return [folder for folder in folders if folder == base or base in folder.parents]


def _cgroup_v2(root: Path) -> list[int | None]:
    return [
        _room(
            _read(folder / "memory.max"),
            _read(folder / "memory.current"),
            _read(folder / "memory.stat"),
            "inactive_file",
        )
        for folder in _folders(root, "sys/fs/cgroup", r"^0::(.*)$")
    ]


def _cgroup_v1(root: Path) -> list[int | None]:
    return [
        _room(
            _read(folder / "memory.limit_in_bytes"),
            _read(folder / "memory.usage_in_bytes"),
            _read(folder / "memory.stat"),
            "total_inactive_file",
        )
        for folder in _folders(root, "sys/fs/cgroup/memory", r"^\d+:(?:[^:]*,)?memory(?:,[^:]*)?:(.*)$")
    ]
