"""Which rates a plan's seconds come from: measured ones that are kept, a known card's row, or a measurement now.

On a CPU nothing is measured without being asked (`finetune bench`): the assumed row serves, and the same recipe gets the
same plan on every CPU that was not measured.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from finetune.environment import cache_folder
from finetune.errors import InputError
from finetune.machine import rates_cache
from finetune.machine.rates import Rates
from finetune.planner.hardware import Hardware

Say = Callable[[str], None]


def rates_folder() -> Path:
    return cache_folder() / "rates"


def with_rates(hardware: Hardware, say: Say, measures: bool = False) -> Hardware:
    """This machine with its measured rates, where they are kept; else as it is. With `measures`, a GPU that is not known by
    name is measured first, which takes seconds and is said in a line."""
    machine = rates_cache.this_machine(hardware.name if hardware.device == "cuda" else "", hardware.cores)
    found, why = rates_cache.read(rates_folder(), machine)
    if found is not None:
        return replace(hardware, rates=found)
    unknown = hardware.device == "cuda" and hardware.rates is None
    if measures and (why or unknown) and hardware.device == "cuda":
        try:
            return replace(hardware, rates=measure(hardware, say, why))
        except InputError as error:
            say(f"{error.fault.what}: the plan's seconds are those of a middle GPU")
            return hardware
    if why:
        say(f"{why}; `finetune bench` measures anew")
    return hardware


def measure(hardware: Hardware, say: Say, why: str = "") -> Rates:
    """Measures this machine and keeps the rates; says what was done in one line. InputError when a GPU has too little room."""
    import torch

    from finetune.machine.measuring import measure as measured

    started = time.perf_counter()
    device = torch.device("cuda", torch.cuda.current_device()) if hardware.device == "cuda" else torch.device("cpu")
    machine = rates_cache.this_machine(hardware.name if hardware.device == "cuda" else "", hardware.cores)
    try:
        rates = measured(device, hardware.name if hardware.device == "cuda" else machine.cpu)
    except torch.OutOfMemoryError as error:
        what = "the machine's rates were not measured, which takes 2 GiB of GPU memory for a moment"
        raise InputError(what, hardware.name, "end what else uses the GPU, then `finetune bench`") from error
    line = f"measured this machine's rates in {time.perf_counter() - started:.1f} s"
    try:
        line += f", kept in {rates_cache.write(rates_folder(), machine, rates)}"
    except OSError as error:
        line += f"; they could not be kept: {error}"
    say(f"{why}; {line}" if why else line)
    return rates
