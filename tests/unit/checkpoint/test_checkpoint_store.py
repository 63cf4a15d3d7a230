"""Checkpoints are whole or not there, and say what is wrong with them."""

import errno
import json
import os
import random
import shutil
import signal
import subprocess
import time

import pytest
import safetensors.torch
import torch

from finetune.checkpoint import folders, store
from finetune.checkpoint.tensorfile import TYPES
from finetune.errors import CheckpointError, InputError


def groups(value: float = 1.0, elements: int = 1000) -> dict[str, dict[str, torch.Tensor]]:
    return {
        "trainable": {
            "b.weight": torch.full((elements,), value),
            "a.weight": torch.full((2, 3), value, dtype=torch.bfloat16),
        },
        "optimizer": {"b.weight/exp_avg": torch.full((elements,), value / 2), "b.weight/step": torch.tensor(value)},
        "random": {"torch": torch.arange(16, dtype=torch.uint8)},
    }


def save(folder, step: int, **options):
    return store.write(folder, step, groups(float(step), **options), {"step": step, "lr": 0.1})


def require_equal(read, expected) -> None:
    assert {name: set(group) for name, group in read.items()} == {name: set(group) for name, group in expected.items()}
    for name, group in expected.items():
        for key, tensor in group.items():
            assert read[name][key].dtype == tensor.dtype
            assert read[name][key].shape == tensor.shape
            assert torch.equal(read[name][key], tensor)


def test_what_was_written_is_read_bit_for_bit(tmp_path):
    facts = {"epoch": 3, "loss": 0.1 + 0.2, "best": None, "names": ["a", "b"], "nested": {"x": [1, 2.5]}}
    path = store.write(tmp_path / "checkpoints", 50, groups(), facts)
    assert path == tmp_path / "checkpoints" / "step-0000050"
    files = ["manifest.json", "optimizer.safetensors", "random.safetensors", "state.json", "trainable.safetensors"]
    assert sorted(os.listdir(path)) == files
    tensors, read_facts = store.read(path)
    require_equal(tensors, groups())
    assert read_facts == facts
    assert os.listdir(path.parent) == ["step-0000050"]
    assert store.step_of(path) == 50


def test_every_element_type_and_odd_shape_survives(tmp_path):
    bits = torch.arange(48, dtype=torch.uint8)
    tensors = {str(kind): bits.view(torch.bool if kind == torch.bool else kind) for kind in TYPES if kind != torch.bool}
    tensors["bool"] = torch.tensor([True, False, True])
    tensors["scalar"] = torch.tensor(7, dtype=torch.int64)
    tensors["empty"] = torch.empty(0, 3)
    tensors["transposed"] = torch.arange(6.0).reshape(2, 3).T
    path = store.write(tmp_path, 1, {"all": tensors}, {})
    read = store.read(path)[0]["all"]
    plain = safetensors.torch.load_file(path / "all.safetensors")
    assert set(plain) == set(tensors)
    for name, tensor in tensors.items():
        for other in (read[name], plain[name]):
            assert other.dtype == tensor.dtype
            assert torch.equal(
                other.contiguous().view(-1).view(torch.uint8), tensor.contiguous().view(-1).view(torch.uint8)
            )
    assert not tensors["transposed"].is_contiguous()


def test_b103_tied_tensors_are_stored_once_and_tied_again(tmp_path):
    weight = torch.randn(100, 8)
    path = store.write(tmp_path, 1, {"trainable": {"embed": weight, "head": weight, "view": weight[:2]}}, {})
    assert (path / "trainable.safetensors").stat().st_size < weight.nbytes * 1.5
    read = store.read(path)[0]["trainable"]
    assert read["embed"] is read["head"]
    assert torch.equal(read["head"], weight)
    assert torch.equal(read["view"], weight[:2])


@pytest.mark.parametrize("name", ["manifest.json", "state.json", "optimizer.safetensors", "trainable.safetensors"])
def test_b74_newest_passes_over_an_incomplete_one_and_names_what_is_missing(tmp_path, name):
    good, broken = save(tmp_path, 10), save(tmp_path, 20)
    (broken / name).unlink()
    path, notices = store.newest(tmp_path)
    assert path == good
    assert len(notices) == 1
    assert f"{name} is missing" in notices[0]
    assert str(broken) in notices[0]
    with pytest.raises(CheckpointError, match=f"{name} is missing") as caught:
        store.read(broken)
    assert str(broken) in str(caught.value)
    assert f"resume={good}" in str(caught.value)
    assert isinstance(caught.value, InputError)


def test_b74_an_empty_folder_and_a_missing_path(tmp_path):
    assert store.newest(tmp_path / "none") == (None, [])
    (tmp_path / "step-0000007").mkdir()
    path, notices = store.newest(tmp_path)
    assert path is None
    assert "manifest.json is missing" in notices[0]
    with pytest.raises(CheckpointError, match="does not exist"):
        store.read(tmp_path / "step-0000099")


def test_newest_goes_by_number_and_other_names_are_left_alone(tmp_path):
    for step in (9, 10, 12345678):
        save(tmp_path, step)
    for name in ("step-best", "best", ".writing-step-0000099@elsewhere-1", "step-0000100.txt"):
        (tmp_path / name).mkdir()
    assert [store.step_of(path) for path in store.complete(tmp_path)] == [9, 10, 12345678]
    assert store.newest(tmp_path)[0].name == "step-12345678"


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda data: data[: len(data) // 2], "is truncated"),
        (lambda data: b"", "is truncated: 0 of"),
        (lambda data: data[:-3] + bytes([data[-3] ^ 1]) + data[-2:], "is corrupt"),
        (lambda data: data + b"x", "is corrupt"),
    ],
    ids=["half", "empty", "flipped", "longer"],
)
@pytest.mark.parametrize("name", ["manifest.json", "state.json", "optimizer.safetensors", "trainable.safetensors"])
def test_b79_damage_is_named_with_its_file_and_the_way_back(tmp_path, name, damage, words):
    good, bad = save(tmp_path, 10), save(tmp_path, 20)
    (bad / name).write_bytes(damage((bad / name).read_bytes()))
    with pytest.raises(CheckpointError) as caught:
        store.read(bad)
    message = str(caught.value)
    assert name in message
    assert (words in message) or (name == "manifest.json" and "truncated or corrupt" in message)
    assert f"resume={good}" in message
    assert store.read(good)[1]["step"] == 10


def test_b79_every_single_flipped_byte_of_a_small_checkpoint_is_found(tmp_path):
    path = store.write(tmp_path, 1, {"t": {"w": torch.arange(4.0)}}, {"a": 1})
    for file in sorted(path.iterdir()):
        data = file.read_bytes()
        for position in range(0, len(data), 7):
            file.write_bytes(data[:position] + bytes([data[position] ^ 4]) + data[position + 1 :])
            with pytest.raises(CheckpointError):
                store.read(path)
        file.write_bytes(data)
    assert store.read(path)[1] == {"a": 1}


def test_a_manifest_cannot_name_files_elsewhere(tmp_path):
    path = save(tmp_path, 1)
    manifest = json.loads((path / "manifest.json").read_text())
    del manifest["sha256"]
    manifest["files"]["../step-0000001/state.json"] = manifest["files"]["state.json"]
    (path / "manifest.json").write_text(json.dumps({**manifest, "sha256": store._digest(manifest)}))
    with pytest.raises(CheckpointError, match=r"manifest.json is corrupt"):
        store.read(path)


def test_another_format_is_refused_by_number(tmp_path):
    path = save(tmp_path, 1)
    manifest = json.loads((path / "manifest.json").read_text())
    del manifest["sha256"]
    manifest["format"] = 99
    (path / "manifest.json").write_text(json.dumps({**manifest, "sha256": store._digest(manifest)}))
    with pytest.raises(CheckpointError, match="its format is 99, this version reads 1"):
        store.read(path)


def test_rotation_keeps_the_newest_and_the_protected(tmp_path):
    paths = {step: save(tmp_path, step) for step in (1, 2, 3, 4, 5)}
    assert store.rotate(tmp_path, 2, [paths[1]]) == [paths[2], paths[3]]
    assert [store.step_of(path) for path in store.complete(tmp_path)] == [1, 4, 5]
    assert sorted(os.listdir(tmp_path)) == ["step-0000001", "step-0000004", "step-0000005"]


def test_b76_keep_zero_is_refused(tmp_path):
    save(tmp_path, 1)
    with pytest.raises(CheckpointError, match="at least one must stay"):
        store.rotate(tmp_path, 0)
    assert len(store.complete(tmp_path)) == 1


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
@pytest.mark.parametrize("step", [2, 1], ids=["next", "over"])
@pytest.mark.parametrize("at", range(1, 13))
def test_b76_b78_a_save_that_fails_anywhere_leaves_the_first_and_nothing_else(tmp_path, monkeypatch, code, at, step):
    first = save(tmp_path, 1)
    calls = iter(range(1, 1000))
    true_fsync = os.fsync

    def failing_fsync(descriptor: int) -> None:
        if next(calls) == at:
            raise OSError(code, os.strerror(code))
        true_fsync(descriptor)

    monkeypatch.setattr(os, "fsync", failing_fsync)
    with pytest.raises(CheckpointError) as caught:
        store.write(tmp_path, step, groups(9.0), {})
    monkeypatch.undo()
    assert next(calls) == at + 1
    expected = "cannot write" if code == errno.EIO else "bytes needed"
    assert expected in str(caught.value)
    assert "the checkpoint step-0000001 is untouched" in str(caught.value)
    assert os.listdir(tmp_path) == ["step-0000001"]
    require_equal(store.read(first)[0], groups(1.0))
    assert store.newest(tmp_path) == (first, [])


def test_b75_files_are_durable_before_the_name_and_the_old_goes_last(tmp_path, monkeypatch):
    save(tmp_path, 1)
    events = []
    for name in ("fsync", "rename", "rmdir"):
        true = getattr(os, name)

        def spy(*arguments, name=name, true=true, **options):
            where = os.readlink(f"/proc/self/fd/{arguments[0]}") if name == "fsync" else str(arguments[0])
            events.append((name, os.path.basename(where)))
            return true(*arguments, **options)

        monkeypatch.setattr(os, name, spy)
    save(tmp_path, 2)
    store.rotate(tmp_path, 1)
    renamed = next(i for i, (name, where) in enumerate(events) if name == "rename" and "writing" in where)
    flushed = {where for name, where in events[:renamed] if name == "fsync"}
    assert {"trainable.safetensors", "optimizer.safetensors", "state.json", "manifest.json"} <= flushed
    assert ("fsync", tmp_path.name) in events[renamed:]
    removed = [i for i, (name, where) in enumerate(events) if where == "step-0000001" or "deleting" in where]
    assert removed
    assert min(removed) > events.index(("fsync", tmp_path.name))


def test_writing_over_a_step_replaces_it(tmp_path):
    save(tmp_path, 1)
    path = store.write(tmp_path, 1, groups(9.0), {"again": True})
    tensors, facts = store.read(path)
    require_equal(tensors, groups(9.0))
    assert facts == {"again": True}
    assert os.listdir(tmp_path) == ["step-0000001"]


def test_a_crash_between_the_two_renames_loses_nothing(tmp_path):
    path = save(tmp_path, 5)
    path.rename(folders.aside(path, "replaced"))
    (path.parent / f".writing-{path.name}@{folders.socket.gethostname()}-1").mkdir()
    found, notices = store.newest(tmp_path)
    assert (store.step_of(found), notices) == (5, [])
    assert store.read(found)[1]["step"] == 5
    save(tmp_path, 6)
    assert [p.name for p in store.complete(tmp_path)] == ["step-0000005", "step-0000006"]


def test_leftovers_of_the_dead_go_and_those_of_the_living_stay(tmp_path):
    host = folders.socket.gethostname()
    sleeper = subprocess.Popen(["sleep", "60"])
    dead = subprocess.Popen(["true"])
    dead.wait()
    names = {
        "living": f".writing-step-0000002@{host}-{sleeper.pid}",
        "dead": f".writing-step-0000002@{host}-{dead.pid}",
        "own": f".writing-step-0000003@{host}-{os.getpid()}",
        "elsewhere": ".writing-step-0000002@other.host-7-1",
        "old": ".writing-step-0000004@other.host-7-1",
        "deleting": f".deleting-step-0000001@{host}-{sleeper.pid}",
    }
    try:
        for name in names.values():
            (tmp_path / name).mkdir()
            (tmp_path / name / "trainable.safetensors").write_bytes(b"0" * 10)
        ago = time.time() - 2 * folders.LEFTOVER_SECONDS
        for path in (tmp_path / names["old"] / "trainable.safetensors", tmp_path / names["old"]):
            os.utime(path, (ago, ago))
        save(tmp_path, 9)
    finally:
        sleeper.kill()
        sleeper.wait()
    assert sorted(os.listdir(tmp_path)) == sorted([names["living"], names["elsewhere"], "step-0000009"])


def test_b75_twenty_kills_always_leave_a_loadable_checkpoint(tmp_path):
    folder = tmp_path / "checkpoints"
    save(folder, 1)
    luck = random.Random(0)
    for _ in range(20):
        last = store.step_of(store.newest(folder)[0])
        child = os.fork()
        if child == 0:
            try:
                for step in range(last, last + 10_000):
                    # From `last`: the newest one is written over, too.
                    save(folder, step, elements=20_000)
                    store.rotate(folder, keep=1)
            finally:
                os._exit(1)
        time.sleep(luck.uniform(0.0, 0.4))
        os.kill(child, signal.SIGKILL)
        assert os.WIFSIGNALED(os.waitpid(child, 0)[1])
        path, notices = store.newest(folder)
        assert notices == []
        step = store.step_of(path)
        tensors, facts = store.read(path)
        assert step >= last
        assert facts["step"] == step
        assert set(tensors["trainable"]["b.weight"].tolist()) == {float(step)}
    assert step > 1
    save(folder, step + 1)
    store.rotate(folder, keep=1)
    assert os.listdir(folder) == [f"step-{step + 1:07d}"]
    shutil.rmtree(folder)
