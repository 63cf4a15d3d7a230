"""Whoever reads the output may leave (a closed pipe): the run goes on to its end and keeps its result, and signals still save."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from finetune.checkpoint import store
from tests.conftest import changed


def started(recipe: dict[str, Any], place: Path) -> subprocess.Popen[bytes]:
    """The run as a process of its own, of whose output one line is read before the pipe is closed."""
    path = place / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    process = subprocess.Popen(
        [sys.executable, "-m", "finetune", f"recipe={path}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        preexec_fn=heeding_hang_ups,
    )
    assert process.stdout is not None
    assert process.stdout.readline()
    process.stdout.close()
    return process


def heeding_hang_ups() -> None:
    """Also where the tests themselves run under nohup, which a child would inherit."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def test_a_run_whose_reader_left_ends_with_its_result(tiny: dict[str, Any], tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = started(changed(tiny, run__dir=str(run)), tmp_path)
    assert process.wait(timeout=120) == 0
    assert (run / "adapter" / "adapter_model.safetensors").is_file()
    assert (run / "summary.json").is_file()


def steps_done(run: Path, count: int = 3) -> None:
    """Waits until the run has written so many steps."""
    metrics = run / "metrics.jsonl"
    until = time.monotonic() + 100
    while time.monotonic() < until and not (metrics.exists() and metrics.read_text().count('"loss"') >= count):
        time.sleep(0.1)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_after_the_reader_left_still_saves(tiny: dict[str, Any], tmp_path: Path, number: int) -> None:
    run = tmp_path / "run"
    process = started(changed(tiny, run__dir=str(run), train__max_steps=100_000), tmp_path)
    steps_done(run)
    os.kill(process.pid, number)
    assert process.wait(timeout=60) == 4
    assert store.complete(run / "checkpoints")


def test_a_terminal_that_is_closed_saves_the_run(tiny: dict[str, Any], tmp_path: Path) -> None:
    """The terminal's own hang-up: SIGHUP comes, and every further word on the terminal fails with an input/output error."""
    run, path = tmp_path / "run", tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(changed(tiny, run__dir=str(run), train__max_steps=100_000)))
    child, terminal = pty.fork()
    if child == 0:
        heeding_hang_ups()
        os.execv(sys.executable, [sys.executable, "-m", "finetune", f"recipe={path}"])
    reading = threading.Thread(target=drain, args=(terminal,), daemon=True)
    reading.start()
    steps_done(run)
    os.kill(child, signal.SIGSTOP)  # so that it is not in the middle of a word, and the order is always the same
    os.close(terminal)
    os.kill(child, signal.SIGCONT)
    assert ended(child) == 4
    assert store.complete(run / "checkpoints")


def ended(child: int, seconds: float = 60) -> int:
    """The exit code of a process, which is killed when it does not end."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.1)
    os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def drain(terminal: int) -> None:
    try:
        while select.select([terminal], [], [], 1)[0] and os.read(terminal, 65536):
            pass
    except (OSError, ValueError):
        return


def test_a_run_under_nohup_goes_on_after_a_hang_up(tiny: dict[str, Any], tmp_path: Path) -> None:
    """A SIGHUP that the process was started to ignore is still ignored."""
    run, path = tmp_path / "run", tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(changed(tiny, run__dir=str(run), train__max_steps=60)))
    command = ["nohup", sys.executable, "-m", "finetune", f"recipe={path}"]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    steps_done(run)
    os.kill(process.pid, signal.SIGHUP)
    assert process.wait(timeout=120) == 0
    assert (run / "summary.json").is_file()
