"""The cache of measured rates: one small JSON file a machine, in the cache folder.

A machine is its GPU, driver and torch, its CPU and its cores. Rates of another machine, of another version of this file or
of a damaged one are not used; why is said. Nothing here imports torch.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import re
import tempfile
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from finetune.machine.rates import Rates, from_dict

FORM = 1
"""Raised where what is measured, or how, changes: older files are then measured anew."""


@dataclass(frozen=True)
class Machine:
    """What a measurement belongs to."""

    gpu: str
    driver: str
    torch: str
    cpu: str
    cores: int

    @property
    def file(self) -> str:
        """A file name of this machine's own."""
        kind = re.sub(r"[^a-z0-9]+", "-", (self.gpu or "cpu").lower()).strip("-")
        digest = hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()
        return f"{kind[:40]}-{digest[:16]}.json"


def this_machine(gpu: str, cores: int, root: Path = Path("/")) -> Machine:
    """This machine with the GPU of that name (empty: none)."""
    try:
        torch = version("torch")
    except PackageNotFoundError:
        torch = ""
    driver = _first(root / "proc/driver/nvidia/version", r"(\d+\.\d+(?:\.\d+)?)") if gpu else ""
    cpu = _first(root / "proc/cpuinfo", r"^model name\s*:\s*(.+)$") or platform.processor() or platform.machine()
    return Machine(gpu, driver, torch, cpu, cores)


def _first(path: Path, pattern: str) -> str:
    try:
        match = re.search(pattern, path.read_text(encoding="utf-8", errors="replace"), re.MULTILINE)
    except OSError:
        return ""
    return match[1].strip() if match else ""


def read(folder: Path, machine: Machine) -> tuple[Rates | None, str]:
    """The rates kept for this machine, and why there are none although a file is there (empty where nothing is)."""
    path = folder / machine.file
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None, ""
    except (OSError, UnicodeDecodeError) as error:
        return None, f"the machine's measured rates cannot be read ({path}: {error})"
    try:
        found = json.loads(text)
        if not isinstance(found, dict):
            raise ValueError("it holds no table")
        if found.get("form") != FORM:
            return None, f"the machine's measured rates are of another version of this program ({path})"
        if found.get("machine") != asdict(machine):
            return None, f"the measured rates are of another machine ({path})"
        return from_dict(found.get("rates")), ""
    except (ValueError, RecursionError) as error:
        return None, f"the machine's measured rates are damaged ({path}: {error})"


def write(folder: Path, machine: Machine, rates: Rates) -> Path:
    """Keeps the rates, whole or not at all. OSError where the folder cannot be written."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / machine.file
    text = json.dumps({"form": FORM, "machine": asdict(machine), "rates": rates.as_dict()}, indent=2) + "\n"
    handle, name = tempfile.mkstemp(prefix=f".{path.stem}-", dir=folder)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        Path(name).replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            Path(name).unlink()
        raise
    return path
