"""Cells of a benchmark, each in a process of its own, so that none sees another's memory; a failing one does not stop the rest.

Where making the model takes longer than measuring it, several cells in turn share a process (`in_turn`).
"""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


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
        _append(line, out)
    return failed


@dataclass(frozen=True)
class Limits:
    """`cell`: seconds that one may take; `ends`: when all must be over, by time.monotonic()."""

    cell: float
    ends: float


def in_turn(command: list[str], named: list[tuple[str, Any]], limits: Limits, begins: str, out: Path | None) -> int:
    """Runs many cells in as few processes as there can be; appends each line that begins so to `out` as soon as it is there.

    The process is this Python with `command --cells JSON`; it prints `begin N`, the cell's lines, `done N` or `failed N why`. One
    that is over its time is ended, and the cells after it get a new process; so they do where the process ends by itself.
    Returns how many failed. Cells that there is no time for (less is left than the longest took) are named and do not
    count.
    """
    failed, left = 0, list(named)
    while left and time.monotonic() < limits.ends:
        bad, finished, late = _one_process(command, left, limits, begins, out)
        failed += bad
        left = left[finished:]
        if late:
            break
    if left:
        print(f"no time for {len(left)}: {'; '.join(name for name, _ in left)}", flush=True)
    return failed


def _one_process(
    command: list[str], named: list[tuple[str, Any]], limits: Limits, begins: str, out: Path | None
) -> tuple[int, int, bool]:
    """(cells that failed, cells that are over, the failed ones among them; whether there is no time for more)."""
    asked = [sys.executable, *command, "--cells", json.dumps([values for _, values in named])]
    process = subprocess.Popen(asked, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    lines: queue.Queue[str | None] = queue.Queue()
    threading.Thread(target=_read, args=(process, lines), daemon=True).start()
    failed, over, at, started, longest = 0, 0, -1, time.monotonic(), 0.0
    said: list[str] = []
    while True:
        ends = min(limits.ends, started + limits.cell)
        try:
            line = lines.get(timeout=max(0.0, ends - time.monotonic()))
        except queue.Empty:
            process.kill()
            process.wait()
            if over == len(named):  # all is measured; it only did not end
                return failed, over, False
            if time.monotonic() >= limits.ends:
                return failed, over, True  # the one that was cut off is still to be measured
            print(f"{named[over][0]} took longer than {limits.cell:.0f} s", flush=True)
            return failed + 1, over + 1, False
        if line is None:
            break
        said = [*said[-40:], line]
        word, _, rest = line.partition(" ")
        if word == "begin" and rest.isdigit():
            at, started = int(rest), time.monotonic()
            if started + longest > limits.ends:
                process.kill()
                process.wait()
                return failed, over, True
        elif word == "failed" and at == over:
            print(f"{named[at][0]} failed: {rest.partition(' ')[2]}", flush=True)
            failed, over = failed + 1, over + 1
        elif word == "done" and at == over:
            over, longest = over + 1, max(longest, time.monotonic() - started)
        elif line.startswith(begins):
            print(line, flush=True)
            _append(line, out)
    process.wait()
    if over == len(named) or (process.returncode in (0, 3) and over):
        return failed, over, False
    print(f"{named[over][0]} ended its process ({process.returncode}):\n" + "\n".join(said[-15:]), flush=True)
    return failed + 1, over + 1, False


def _read(process: subprocess.Popen[str], lines: queue.Queue[str | None]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        lines.put(line.rstrip("\n"))
    lines.put(None)


def _append(line: str, out: Path | None) -> None:
    if out is None:
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("a", encoding="utf-8") as file:
        file.write(line + "\n")
