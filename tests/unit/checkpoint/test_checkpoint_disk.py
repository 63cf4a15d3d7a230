"""Disks that are full or read-only, and the rehearsal that finds it out before training."""

import os
import resource
import subprocess

import pytest
import torch

from finetune.checkpoint import folders, store
from finetune.errors import CheckpointError


def save(folder, step: int, elements: int = 1000):
    weights = {"trainable": {"w": torch.full((elements,), float(step))}}
    moments = {"optimizer": {"w/exp_avg": torch.full((elements,), step / 2)}}
    return store.write(folder, step, {**weights, **moments}, {"step": step})


def require_first(path) -> None:
    tensors, facts = store.read(path)
    assert facts == {"step": 1}
    assert set(tensors["trainable"]["w"].tolist()) == {1.0}
    assert set(tensors["optimizer"]["w/exp_avg"].tolist()) == {0.5}


class Disk:
    """A place with little room: a 5 MB tmpfs where mounting is allowed, else a folder under a file-size limit."""

    def __init__(self, path, mounted: bool) -> None:
        self.path, self.mounted = path, mounted

    def remount(self, options: str) -> None:
        subprocess.run(["mount", "-o", f"remount,{options}", str(self.path)], check=True)


@pytest.fixture
def small_disk(tmp_path):
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=5m", "tmpfs", str(place)]
    mounted = os.geteuid() == 0 and subprocess.run(command, capture_output=True).returncode == 0
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        yield Disk(place, mounted)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        if mounted:
            subprocess.run(["umount", str(place)], check=True)


def test_b78_disk_full_says_needed_and_free_bytes_and_keeps_the_old_one(small_disk):
    first = save(small_disk.path, 1, elements=1000)
    if not small_disk.mounted:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    with pytest.raises(
        CheckpointError, match=r"not enough disk space: 8,\d{3},\d{3} bytes needed, [\d,]+ free"
    ) as caught:
        save(small_disk.path, 2, elements=1_000_000)
    assert caught.value.exit_code == 2
    assert os.listdir(small_disk.path) == ["step-0000001"]
    require_first(first)


def test_b78_disk_that_fills_up_while_writing(small_disk, monkeypatch):
    """The space check passed, then another program took the room."""
    first = save(small_disk.path, 1, elements=1000)
    if small_disk.mounted:
        true_require = folders.require_space

        def require_then_fill(folder, needed: int, note: str = "") -> None:
            true_require(folder, needed, note)
            (small_disk.path / "other").write_bytes(b"0" * (3 * 2**20))

        monkeypatch.setattr(folders, "require_space", require_then_fill)
    else:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    with pytest.raises(CheckpointError, match=r"not enough disk space: 4,\d{3},\d{3} bytes needed, [\d,]+ free"):
        save(small_disk.path, 2, elements=500_000)
    assert set(os.listdir(small_disk.path)) <= {"step-0000001", "other"}
    require_first(first)


def test_b76_b105_read_only_disk(small_disk):
    first = save(small_disk.path, 1)
    if small_disk.mounted:
        small_disk.remount("ro")
    else:
        small_disk.path.chmod(0o500)
    with pytest.raises(CheckpointError, match=r"read-only|no permission"):
        save(small_disk.path, 2)
    with pytest.raises(CheckpointError, match=r"read-only|no permission"):
        store.rehearse(small_disk.path, 1000)
    require_first(first)
    small_disk.path.chmod(0o700) if not small_disk.mounted else small_disk.remount("rw")


def test_b105_rehearsal_finds_what_would_fail(tmp_path):
    store.rehearse(tmp_path / "new" / "checkpoints", 1000)
    assert os.listdir(tmp_path / "new" / "checkpoints") == []
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="a file stands where a folder is needed"):
        store.rehearse(tmp_path / "file", 1000)
    with pytest.raises(CheckpointError, match="a file stands where a folder is needed"):
        store.rehearse(tmp_path / "file" / "checkpoints", 1000)
    with pytest.raises(CheckpointError, match="name too long"):
        store.rehearse(tmp_path / ("x" * 300), 1000)
    with pytest.raises(
        CheckpointError, match=r"not enough disk space: 1,000,000,000,000,000 bytes needed, [\d,]+ free"
    ):
        store.rehearse(tmp_path, 10**15)


def test_rehearsal_leaves_existing_checkpoints_alone(tmp_path):
    path = save(tmp_path, 3)
    store.rehearse(tmp_path, 1000)
    assert os.listdir(tmp_path) == [path.name]


def test_what_a_dead_process_set_aside_for_a_target_is_cleared_when_it_is_written(tmp_path):
    """Exports have no store to tidy up after them; names of other targets and of living processes are left alone."""
    dead = subprocess.Popen(["true"])
    dead.wait()
    host = os.uname().nodename
    gone = [f".{kind}-adapter@{host}-{dead.pid}" for kind in ("writing", "replaced", "deleting")]
    kept = [f".writing-other@{host}-{dead.pid}", f".writing-adapter@{host}-{os.getppid()}"]
    for name in gone + kept:
        (tmp_path / name).mkdir()
        (tmp_path / name / "weights").write_text("half")
    with folders.written(tmp_path / "adapter", 10) as new:
        (new / "weights").write_text("whole")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*kept, "adapter"])


def test_a_small_file_is_written_whole_or_not_at_all(small_disk):
    text = "x" * 100
    folders.write_text(small_disk.path / "summary.json", text)
    if not small_disk.mounted:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    with pytest.raises(CheckpointError, match="not enough disk space: 8,000,000 bytes needed"):
        folders.write_text(small_disk.path / "summary.json", "y" * 8_000_000)
    assert [path.name for path in small_disk.path.iterdir()] == ["summary.json"]
    assert (small_disk.path / "summary.json").read_text() == text
