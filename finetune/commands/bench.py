"""`finetune bench`: measures how fast this machine is, prints it, and keeps it for the planner."""

from __future__ import annotations

import sys
from typing import Any

from finetune.commands.arguments import COMMAND_LINE, Takes, read
from finetune.commands.screen import show, show_json, table
from finetune.errors import ConfigError, Fault

HELP = """
Measures this machine's rates: matrix products, memory, the link between host and GPU, launches, decoding of 4-bit weights.
It takes some seconds. The rates are kept in the cache folder, and plans take their seconds from them.

Examples:
  finetune bench
  finetune bench device=cpu
  finetune bench --json
"""
TAKES = Takes(own={"device": "cpu or cuda (default: the GPU where there is one)"})

ROWS: tuple[tuple[str, str, float, str], ...] = (
    ("products, bf16", "bf16_operations_per_s", 1e12, "TFLOP/s"),
    ("products, fp32", "fp32_operations_per_s", 1e12, "TFLOP/s"),
    ("products, FP8", "fp8_operations_per_s", 1e12, "TFLOP/s"),
    ("memory, read and written", "memory_bytes_per_s", 1e9, "GB/s"),
    ("host to device", "up_bytes_per_s", 1e9, "GB/s"),
    ("device to host", "down_bytes_per_s", 1e9, "GB/s"),
    ("each way, both at once", "both_bytes_per_s", 1e9, "GB/s"),
    ("registering host memory", "pin_bytes_per_s", 1e9, "GB/s"),
    ("host memory, copied", "host_copy_bytes_per_s", 1e9, "GB/s"),
    ("NF4 weights decoded", "decode_weights_per_s", 1e9, "10^9/s"),
    ("one launch", "launch_s", 1e-6, "microseconds"),
    ("all-reduce between GPUs", "collective_bytes_per_s", 1e9, "GB/s"),
)
"""Label, field, unit and the unit's name of every line."""


def main(arguments: list[str]) -> int:
    given = read(arguments, TAKES)
    faults = list(given.faults)
    device = given.own.get("device", "auto")
    if device not in ("auto", "cpu", "cuda"):
        faults.append(Fault(f"{COMMAND_LINE} device", f"{device!r} is no device", "cpu, cuda, or leave it out"))
    if faults:
        raise ConfigError(faults)
    from finetune.planner.hardware import detect
    from finetune.planner.machine_rates import measure

    hardware = detect(device)
    said: list[str] = []
    rates = measure(hardware, said.append)
    values: dict[str, Any] = rates.as_dict()
    for line in said:
        print(line, file=sys.stderr)
    if given.json:
        show_json(values)
        return 0
    rows = [(label, f"{values[key] / unit:,.4g} {word}") for label, key, unit, word in ROWS if values[key] is not None]
    if rates.gpus:
        rows.append(("GPUs", f"{rates.gpus}{f', joined by {rates.topology}' if rates.topology else ''}"))
    if rates.peer_access is not None:
        rows.append(("GPUs reach each other's memory", "yes" if rates.peer_access else "no"))
    show(table(("rate", "measured"), rows, rates.name))
    if rates.source != "measured":
        show(rates.source)
    return 0
