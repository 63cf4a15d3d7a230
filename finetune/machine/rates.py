"""How fast a machine is: one value with units in its names, the rows of known machines, and JSON in between.

A row is a card's public figures times what of them is reached (EFFICIENCY below), so that a plan can be made for a machine
that is not here. machine/measuring makes the same value from the machine itself.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

PRODUCTS = 0.80
"""What large matrix products reach of a card's dense figure: 790 of 989 TFLOP/s were measured on one H200 in bf16."""
MEMORY = 0.90
"""What copies reach of its memory's figure: 4.3 of 4.8 TB/s on one H200."""
LINK, LINK_BOTH = 0.86, 0.80
"""What pinned copies reach of PCI Express's figure one way, alone and while the other way is busy too: 55 and 51 of 64 GB/s."""
DECODE_BYTES = 2.5
"""Bytes that decoding one NF4 weight reads and writes: half a byte of code, two of bf16."""
DECODE = 0.42
"""What bitsandbytes' decoding reaches of the memory's rate: QLoRA's lines beside LoRA's in benchmarks/results say 1.4e-12 s a
weight on one H200."""
COLLECTIVE = 0.8
"""What an all-reduce reaches of the links between GPUs, one way. Assumed."""


@dataclass(frozen=True)
class Rates:
    """What a machine does in a second. `source`: measured, data sheet or assumed.

    `*_operations_per_s`: matrix products (two operations a product and sum). `memory_bytes_per_s`: bytes read and written
    by copies on the device. `up`, `down`: pinned copies from host to device and back, alone; `both`: each of them while the
    other runs. `pin_bytes_per_s`: registering host memory. `launch_s`: one small operation from Python.
    `decode_weights_per_s`: 4-bit weights decoded to 16 bits. `collective_bytes_per_s`: bytes that an all-reduce moves a
    GPU. None: not measured, or not there. `topology`: how the GPUs are joined, in words.
    """

    name: str
    source: str
    bf16_operations_per_s: float
    fp32_operations_per_s: float
    fp8_operations_per_s: float | None
    memory_bytes_per_s: float
    up_bytes_per_s: float
    down_bytes_per_s: float
    both_bytes_per_s: float
    pin_bytes_per_s: float | None
    launch_s: float
    decode_weights_per_s: float
    host_copy_bytes_per_s: float
    gpus: int = 0
    peer_access: bool | None = None
    collective_bytes_per_s: float | None = None
    topology: str = ""

    def operations_per_s(self, width: int) -> float:
        """Products of elements of so many bytes."""
        return self.bf16_operations_per_s if width < 4 else self.fp32_operations_per_s

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


SMALLEST, LARGEST = 1e-12, 1e24
"""What a rate may be: beyond these, seconds made with it are no numbers."""
REQUIRED = {each.name for each in fields(Rates) if each.type == "float"}
"""Fields that are a positive number."""
OPTIONAL = {each.name for each in fields(Rates) if each.type == "float | None"}
"""Fields that are a positive number or None."""


def from_dict(values: Any) -> Rates:
    """Rates from what `as_dict` gave. ValueError says what is missing, unknown, or no positive number."""
    if not isinstance(values, Mapping):
        raise ValueError("it holds no table of rates")
    names = {each.name for each in fields(Rates)}
    if names != set(values):
        raise ValueError(f"it has other fields: {', '.join(sorted(map(str, names ^ set(values))))}")
    for name in REQUIRED | OPTIONAL:
        value = values[name]
        if value is None and name in OPTIONAL:
            continue
        number = isinstance(value, int | float) and not isinstance(value, bool)
        # Compared, since a whole number may be too large for a float.
        if not number or not SMALLEST <= value <= LARGEST:
            raise ValueError(f"{name} is {value!r}, which is no positive number")
    wrong = [name for name in ("name", "source", "topology") if not isinstance(values[name], str)]
    wrong += [] if isinstance(values["gpus"], int) and values["gpus"] >= 0 else ["gpus"]
    wrong += [] if values["peer_access"] in (None, True, False) else ["peer_access"]
    if wrong:
        raise ValueError(f"{', '.join(wrong)}: of another kind")
    return Rates(**values)


@dataclass(frozen=True)
class Sheet:
    """A card's public figures: dense TFLOP/s, GB/s of its memory, of its link one way, and to other cards one way."""

    bf16: float
    fp32: float
    fp8: float | None
    memory: float
    link: float
    between: float | None


SHEETS = {
    "rtx4090-24": Sheet(165.2, 82.6, 330.3, 1008, 32, None),
    "a100-80": Sheet(312, 19.5, None, 2039, 32, 300),
    "h100-80": Sheet(989, 67, 1979, 3350, 64, 450),
    "h200-141": Sheet(989, 67, 1979, 4800, 64, 450),
}
"""NVIDIA's data sheets: Ada GPU architecture (GeForce RTX 4090: products with fp32 sums), A100 80GB SXM, H100 SXM, H200 SXM.
The link is PCI Express 4.0 or 5.0 x16, the connection between cards NVLink, half of what the sheet gives for both ways."""

HOST = {"pin_bytes_per_s": 2e9, "launch_s": 5e-6, "host_copy_bytes_per_s": 9e9}
"""Of a host of such cards: 16 GB were registered in some 8 s, pageable copies ran at 9 GB/s (one H200's host); a launch from
Python is assumed."""


def _row(name: str, sheet: Sheet) -> Rates:
    memory, link = sheet.memory * 1e9 * MEMORY, sheet.link * 1e9
    return Rates(
        name=name,
        source="data sheet",
        bf16_operations_per_s=sheet.bf16 * 1e12 * PRODUCTS,
        fp32_operations_per_s=sheet.fp32 * 1e12 * PRODUCTS,
        fp8_operations_per_s=None if sheet.fp8 is None else sheet.fp8 * 1e12 * PRODUCTS,
        memory_bytes_per_s=memory,
        up_bytes_per_s=link * LINK,
        down_bytes_per_s=link * LINK,
        both_bytes_per_s=link * LINK_BOTH,
        decode_weights_per_s=memory * DECODE / DECODE_BYTES,
        gpus=1,
        peer_access=sheet.between is not None,
        collective_bytes_per_s=None if sheet.between is None else sheet.between * 1e9 * COLLECTIVE,
        topology="PCI Express" if sheet.between is None else "NVLink",
        **HOST,
    )


CPU = Rates(
    name="cpu",
    source="assumed",
    bf16_operations_per_s=6e10,
    fp32_operations_per_s=6e10,
    fp8_operations_per_s=None,
    memory_bytes_per_s=1e10,
    up_bytes_per_s=5e9,
    down_bytes_per_s=5e9,
    both_bytes_per_s=5e9,
    pin_bytes_per_s=None,
    launch_s=5e-6,
    decode_weights_per_s=1e9,
    host_copy_bytes_per_s=5e9,
)
"""A CPU of some cores; nothing of it is known."""

ROWS: dict[str, Rates] = {**{name: _row(name, sheet) for name, sheet in SHEETS.items()}, "cpu": CPU}
"""The known machines, by the names that `hardware=` takes."""

MIDDLE = "a100-80"
"""The row of a GPU that is not named (`hardware=1x24GB,64GB`): neither the slowest nor the fastest of them."""
ASSUMED = {"cpu": CPU, "cuda": replace(ROWS[MIDDLE], name=f"{MIDDLE}, a middle one: the GPU is not known by name")}

NAMES = {
    "rtx4090-24": r"RTX 4090$",
    "a100-80": r"A100-SXM4-80GB$",
    "h100-80": r"H100 80GB HBM3$",
    "h200-141": r"\bH200$",
}
"""What a driver calls these cards; their siblings (PCIe, NVL, laptop, a slice by MIG) are other cards."""


def row_of(name: str) -> Rates | None:
    """The row of a GPU by its driver's name for it; None for another card."""
    found = [key for key, pattern in NAMES.items() if re.search(pattern, name.strip())]
    return ROWS[found[0]] if found else None
