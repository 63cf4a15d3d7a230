"""The lock of a run folder: one holder, found out at once, and never left behind by a dead one."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from finetune.checkpoint.lock import LOCK, held
from finetune.errors import CheckpointError


def test_one_holder_at_a_time_and_nothing_is_left(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "one"
    with held(folder) as notice:
        assert notice == ""
        with pytest.raises(CheckpointError, match=rf"process {os.getpid()} on "), held(folder):
            raise AssertionError("held twice")
        assert (folder / LOCK).exists()
    assert not folder.exists()


def test_a_folder_with_something_in_it_stays(tmp_path: Path) -> None:
    with held(tmp_path / "run"):
        (tmp_path / "run" / "recipe.yaml").write_text("")
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["recipe.yaml"]


def test_a_killed_holder_holds_nothing(tmp_path: Path) -> None:
    ready, tell = os.pipe()
    child = os.fork()
    if child == 0:
        with held(tmp_path / "run"):
            os.write(tell, b"x")
            signal.pause()
    assert os.read(ready, 1) == b"x"
    with pytest.raises(CheckpointError, match=f"process {child}"), held(tmp_path / "run"):
        pass
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert (tmp_path / "run" / LOCK).exists()
    with held(tmp_path / "run") as notice:
        assert notice == ""


def test_a_place_that_cannot_be_made_is_said_with_its_reason(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(CheckpointError, match="a file stands where a folder is needed"),
        held(tmp_path / "file" / "run"),
    ):
        pass
