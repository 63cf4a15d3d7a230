"""Checkpoints on the disk: one folder a step, complete or not there.

    step-0000050/
        trainable.safetensors, optimizer.safetensors, ...   one file a group of named tensors
        state.json                                          facts: numbers, texts, lists
        manifest.json                                       name, size and sha256 of each file; written last

A folder without a manifest that fits its files is never taken for a checkpoint. Order of events: write aside, flush
every file, flush the folder, rename, flush the parent; only then does anyone delete an older one. The price is room for
one checkpoint more than are kept.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor

from finetune.checkpoint.folders import ASIDE, clear_leftovers, remove, sync, written
from finetune.checkpoint.tensorfile import header_of, payload_bytes, read_tensors, write_tensors
from finetune.errors import CheckpointError

FORMAT = 1
MANIFEST = "manifest.json"
FACTS = "state.json"
SUFFIX = ".safetensors"
STEP = re.compile(r"^step-(\d{7,})$")
SLACK = 64 * 1024
"""Bytes beside the files themselves: the manifest and the file system's own records."""


def path_of(folder: Path, step: int) -> Path:
    return folder / f"step-{step:07d}"


def step_of(path: Path) -> int | None:
    """The step in a checkpoint folder's name, also while an old one is set aside; None for any other name."""
    match = ASIDE.match(path.name)
    name = match[2] if match and match[1] == "replaced" else path.name
    found = STEP.match(name)
    return int(found[1]) if found else None


def bytes_of(tensors: Mapping[str, Mapping[str, Tensor]], facts: Mapping[str, Any]) -> int:
    """Bytes that a checkpoint of these takes on the disk, a little rounded up."""
    files = sum(payload_bytes(group) + len(header_of(group)[0]) for group in tensors.values())
    return files + len(json.dumps(facts)) + SLACK


def write(folder: Path, step: int, tensors: Mapping[str, Mapping[str, Tensor]], facts: Mapping[str, Any]) -> Path:
    """Writes the checkpoint of `step` into `folder` and returns its path, once it is durable.

    `tensors` are groups (a file each) of named tensors on any device; they are not changed, and tied ones are stored once.
    `facts` must be JSON. One of the same step is replaced, and stays until the new one is in place. Raises
    CheckpointError (with needed and free bytes for a full disk); then nothing of the new one is left and older ones are
    untouched.
    """
    target = path_of(folder, step)
    older = newest(folder)[0]
    note = f"; the checkpoint {older.name} is untouched" if older else ""
    with written(target, bytes_of(tensors, facts), note) as new:
        files = {}
        for name, group in tensors.items():
            size, digest = write_tensors(new / (name + SUFFIX), group)
            files[name + SUFFIX] = {"size": size, "sha256": digest}
        files[FACTS] = _write_json(new / FACTS, facts)
        manifest = {"format": FORMAT, "step": step, "files": files}
        _write_json(new / MANIFEST, {**manifest, "sha256": _digest(manifest)})
    # The checkpoint is durable: tidying up that fails (another run may do the same now) is left to the next write.
    with suppress(OSError):
        clear_leftovers(folder)
        _settle(folder)
    return target


def read(path: Path) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
    """The groups of tensors (on the CPU) and the facts of one checkpoint, every byte checked against the manifest.

    Raises CheckpointError that names the file and what is wrong with it, and an older checkpoint to go back to.
    """
    manifest, problems = _manifest(path)
    if problems:
        raise _broken(path, problems)
    try:
        for name, entry in manifest["files"].items():
            if _file_digest(path / name) != entry["sha256"]:
                problems.append(f"{name} is corrupt: its checksum is not the one that was written")
        if problems:
            raise _broken(path, problems)
        groups = {
            name[: -len(SUFFIX)]: read_tensors(path / name) for name in manifest["files"] if name.endswith(SUFFIX)
        }
        return groups, json.loads((path / FACTS).read_text())
    except (SafetensorError, ValueError, OSError) as error:
        raise _broken(path, [f"it cannot be read: {error}"]) from error


def complete(folder: Path) -> list[Path]:
    """Complete checkpoints in `folder`, oldest first. Sizes are checked; checksums when one is read.

    While one is being written over, its old form counts (under the name it was set aside with) until the new one is in place.
    """
    return [path for path, problems in _candidates(folder) if not problems]


def newest(folder: Path) -> tuple[Path | None, list[str]]:
    """The newest complete checkpoint, or None, and a notice for each newer one that was passed over: its name and what it lacks."""
    notices = []
    for path, problems in reversed(_candidates(folder)):
        if not problems:
            return path, notices
        notices.append(f"checkpoint {path} is not complete and was passed over: {'; '.join(problems)}")
    return None, notices


def rotate(folder: Path, keep: int, protect: Collection[Path] = ()) -> list[Path]:
    """Deletes all but the newest `keep` complete checkpoints and those of the steps in `protect`; the paths deleted.

    Call it after `write` returned. Incomplete folders are not counted and not deleted.
    """
    if keep < 1:
        raise CheckpointError(
            f"checkpoint.keep is {keep}: at least one must stay", "checkpoint.keep", "set it to 1 or more"
        )
    safe = {step_of(Path(path)) for path in protect}
    doomed = [path for path in complete(folder)[:-keep] if step_of(path) not in safe]
    for path in doomed:
        _delete(path)
    return doomed


def drop_later(folder: Path, step: int) -> list[Path]:
    """Deletes complete checkpoints of steps after `step`: a run that went back has left their history; the paths deleted."""
    later = [path for path in complete(folder) if (step_of(path) or 0) > step]
    for path in later:
        _delete(path)
    return later


def _delete(path: Path) -> None:
    try:
        remove(path)
    except OSError as error:
        raise CheckpointError(f"cannot delete an old checkpoint: {error.strerror or error}", str(path)) from error


def rehearse(folder: Path, bytes_needed: int) -> None:
    """Walks the save path with one small file before any step is trained; CheckpointError for what would fail later.

    Found out: no permission, a file where the folder should be, a name too long, a read-only disk, fewer than
    `bytes_needed` bytes free. The folder exists afterwards; nothing else is left.
    """
    trial = path_of(folder, 10**7 - 1).with_name(".rehearsal-" + path_of(folder, 10**7 - 1).name)
    with written(trial, bytes_needed) as new:
        _write_json(new / FACTS, {"rehearsal": True})
    remove(trial)


def _candidates(folder: Path) -> list[tuple[Path, list[str]]]:
    """Checkpoint folders by step, each with its faults; a set-aside old form only where its step has no sound folder."""
    if not folder.is_dir():
        return []
    found: dict[int, tuple[Path, list[str]]] = {}
    # Names with a dot sort before "step-", so a folder in its right place is seen last and wins when it is sound.
    for path in sorted(folder.iterdir()):
        step = step_of(path)
        if step is None:
            continue
        problems = _manifest(path)[1]
        if step not in found or not problems or found[step][1]:
            found[step] = (path, problems)
    return [found[step] for step in sorted(found)]


def _settle(folder: Path) -> None:
    """After a crash between the two renames of `publish`: puts set-aside checkpoints back, or deletes them when replaced."""
    for path in folder.iterdir():
        step = step_of(path)
        if step is None or path.name.startswith("step-"):
            continue
        target = path_of(folder, step)
        if not target.exists() and not _manifest(path)[1]:
            path.rename(target)
            sync(folder)
        elif target.exists() and not _manifest(target)[1]:
            remove(path)


def _manifest(path: Path) -> tuple[dict[str, Any], list[str]]:
    """A checkpoint's manifest and everything that is wrong as far as names and sizes tell."""
    if not path.is_dir():
        return {}, ["it is not a folder" if path.exists() else "it does not exist"]
    if not (path / MANIFEST).is_file():
        return {}, [f"{MANIFEST} is missing"]
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        digest = manifest.pop("sha256")
        entries = {name: (int(entry["size"]), str(entry["sha256"])) for name, entry in manifest["files"].items()}
    except OSError as error:
        return {}, [f"{MANIFEST} cannot be read: {error.strerror or error}"]
    except (ValueError, KeyError, TypeError, AttributeError):
        return {}, [f"{MANIFEST} is truncated or corrupt"]
    if digest != _digest(manifest) or any(Path(name).name != name for name in entries):
        return {}, [f"{MANIFEST} is corrupt: its checksum is not the one that was written"]
    if manifest["format"] != FORMAT:
        return {}, [f"its format is {manifest['format']}, this version reads {FORMAT}"]
    return manifest, [fault for name, (size, _) in entries.items() if (fault := _size_fault(path / name, size))]


def _size_fault(file: Path, size: int) -> str:
    if not file.is_file():
        return f"{file.name} is missing"
    there = file.stat().st_size
    if there < size:
        return f"{file.name} is truncated: {there:,} of {size:,} bytes"
    return f"{file.name} is corrupt: {there:,} bytes where {size:,} were written" if there > size else ""


def _broken(path: Path, problems: list[str]) -> CheckpointError:
    others = [
        other for other in complete(path.parent) if other != path and (step_of(other) or 0) <= (step_of(path) or 0)
    ]
    if others:
        remedy = f"go back to the checkpoint before it: resume={others[-1]}"
    else:
        remedy = "there is no older complete checkpoint beside it; give another one to resume=, or start afresh"
    return CheckpointError(f"the checkpoint cannot be used: {'; '.join(problems)}", str(path), remedy)


def _write_json(path: Path, value: Mapping[str, Any]) -> dict[str, Any]:
    data = json.dumps(value, indent=1).encode()
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def _digest(value: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _file_digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
