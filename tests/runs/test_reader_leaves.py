"""Whoever reads the output may leave (a closed pipe): the run goes on to its end and keeps its result, and signals still save."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
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
        [sys.executable, "-m", "finetune", f"recipe={path}"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert process.stdout is not None
    assert process.stdout.readline()
    process.stdout.close()
    return process


def test_a_run_whose_reader_left_ends_with_its_result(tiny: dict[str, Any], tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = started(changed(tiny, run__dir=str(run)), tmp_path)
    assert process.wait(timeout=120) == 0
    assert (run / "adapter" / "adapter_model.safetensors").is_file()
    assert (run / "summary.json").is_file()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_after_the_reader_left_still_saves(tiny: dict[str, Any], tmp_path: Path, number: int) -> None:
    run = tmp_path / "run"
    process = started(changed(tiny, run__dir=str(run), train__max_steps=100_000), tmp_path)
    metrics = run / "metrics.jsonl"
    until = time.monotonic() + 100
    while time.monotonic() < until and not (metrics.exists() and metrics.read_text().count('"loss"') >= 3):
        time.sleep(0.1)
    os.kill(process.pid, number)
    assert process.wait(timeout=60) == 4
    assert store.complete(run / "checkpoints")
