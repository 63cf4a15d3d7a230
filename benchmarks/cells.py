"""Cells of a benchmark, each in a process of its own, so that none sees another's memory; a failing one does not stop the rest."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path


def every(cells: Iterable[tuple[str, list[str]]], begins: str, out: Path) -> int:
    """Runs each (name, arguments of this Python) and appends the last line of its output that begins so to `out`.

    Returns how many failed; of these the end of the output is printed.
    """
    failed = 0
    for name, arguments in cells:
        done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False)
        line = next((text for text in reversed(done.stdout.splitlines()) if text.startswith(begins)), None)
        if line is None:
            failed += 1
            print(f"{name} failed:\n{(done.stderr + done.stdout)[-1500:]}", flush=True)
            continue
        print(line, flush=True)
        out.parent.mkdir(parents=True, exist_ok=True)
        with out.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
    return failed
