"""Folders that appear whole or not at all: written aside, made durable, then renamed.

A crash at any moment leaves the old folder, the new one, or both; what it may leave behind carries a name that starts
with a dot and says whose it is, so that no reader takes it for a result and a later write can clear it away.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from finetune.errors import CheckpointError

LEFTOVER_SECONDS = 3600
"""A `.writing-` folder that no living process of this machine owns is cleared when it was last touched this long ago."""

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""What the system says when a disk, a quota or a file-size limit is used up."""

ASIDE = re.compile(r"^\.(writing|replaced|deleting)-(.+)@(.+)-(\d+)$")


def aside(target: Path, purpose: str) -> Path:
    """The path beside `target` for one purpose: writing (new), replaced (old, until the new one is in place), deleting."""
    return target.parent / f".{purpose}-{target.name}@{socket.gethostname()}-{os.getpid()}"


def sync(path: Path) -> None:
    """Waits until a file or a folder's list of names is on the disk itself."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Every file and folder below, then the folder itself."""
    for place, _, files in os.walk(folder, topdown=False):
        for name in files:
            sync(Path(place, name))
        sync(Path(place))


def remove(path: Path) -> None:
    """Deletes a folder, file or link. A folder is renamed first, so that a crash midway leaves nothing that looks valid."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.is_dir():
        doomed = path if path.name.startswith(".") else aside(path, "deleting")
        if doomed != path:
            path.rename(doomed)
        shutil.rmtree(doomed)


def publish(new: Path, target: Path) -> None:
    """Puts the durable folder `new` in the place of `target`; on a failure both are back where they were.

    An existing target is moved aside first and deleted last.
    """
    old = aside(target, "replaced")
    if target.exists() or target.is_symlink():
        remove(old)
        target.rename(old)
    try:
        new.rename(target)
        sync(target.parent)
    except BaseException:
        if not new.exists() and target.exists():
            target.rename(new)
        if old.exists() or old.is_symlink():
            old.rename(target)
        raise
    # The new one is in place and durable: what cannot be deleted now is no failure of the write.
    with suppress(OSError):
        remove(old)


def free_bytes(folder: Path) -> int:
    """Bytes that this user may still write where `folder` is, or will be."""
    place = folder.absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    return shutil.disk_usage(place).free


def require_space(folder: Path, needed: int, note: str = "") -> None:
    """CheckpointError with both figures when fewer than `needed` bytes are free."""
    free = free_bytes(folder)
    if free < needed:
        raise full_error(folder, needed, free, note)


def full_error(folder: Path, needed: int, free: int, note: str = "") -> CheckpointError:
    what = f"not enough disk space: {needed:,} bytes needed, {free:,} free"
    remedy = "free some space, or let run.dir (path= for an export) point to another disk"
    return CheckpointError(f"{what}{note}", str(folder), remedy)


def _unwritable(error: OSError, target: Path, note: str) -> CheckpointError:
    reasons = {
        errno.EEXIST: "a file stands where a folder is needed",
        errno.ENOTDIR: "a file stands where a folder is needed",
        errno.EROFS: "the disk is read-only",
        errno.EACCES: "no permission",
    }
    reason = reasons.get(error.errno or 0, error.strerror or str(error))
    remedy = "choose a folder that can be written: run.dir, or path= for an export"
    return CheckpointError(f"cannot write: {reason}{note}", str(error.filename or target), remedy)


@contextmanager
def writing(target: Path, needed: int = 0, note: str = "") -> Iterator[None]:
    """Turns the system's errors while `target` is written into CheckpointError: a full disk, no permission, and so on."""
    try:
        yield
    except OSError as error:
        if error.errno in FULL:
            raise full_error(target.parent, needed, free_bytes(target.parent), note) from error
        raise _unwritable(error, target, note) from error


@contextmanager
def written(target: Path, needed: int, note: str = "") -> Iterator[Path]:
    """A folder to fill; on leaving it is made durable and takes the place of `target`.

    `needed` bytes must be free before; `note` is added to messages (what stays intact). On any failure the unfinished
    folder is deleted and what stood at `target` is untouched; system errors and full disks become CheckpointError. What
    a process that is gone had set aside for this target is deleted once the new one is in place.
    """
    new = aside(target, "writing")
    with writing(target, needed, note):
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            require_space(target.parent, needed, note)
            remove(new)
            new.mkdir()
            yield new
            sync_tree(new)
            publish(new, target)
        except BaseException:
            shutil.rmtree(new, ignore_errors=True)
            raise
    with suppress(OSError):
        _clear_abandoned(target)


def write_text(path: Path, text: str) -> None:
    """Writes a small file aside and renames it, so that a reader never sees half of it; CheckpointError as `written`."""
    new = path.with_name(f".{path.name}.new")
    with writing(path, len(text.encode())):
        try:
            new.write_text(text, encoding="utf-8")
            new.replace(path)
        except OSError:
            new.unlink(missing_ok=True)
            raise


def _clear_abandoned(target: Path) -> None:
    """Deletes what interrupted writes of `target` left beside it; `target` itself is whole."""
    for path in target.parent.iterdir():
        match = ASIDE.match(path.name)
        if match and match[2] == target.name and not _alive(path, match[3], int(match[4])):
            remove(path)


def clear_leftovers(folder: Path) -> None:
    """Deletes what interrupted writes left in `folder`; what another living run is writing stays.

    Belongs to nobody: any `.deleting-`; a `.writing-` whose process (of this machine) is gone or is this one, or that
    nothing touched for an hour. `.replaced-` folders are not touched here: the owner of the format knows their use.
    """
    for path in folder.iterdir():
        match = ASIDE.match(path.name)
        if match and (match[1] == "deleting" or (match[1] == "writing" and not _alive(path, match[3], int(match[4])))):
            shutil.rmtree(path, ignore_errors=True)


def _alive(path: Path, host: str, process: int) -> bool:
    if host == socket.gethostname() and process == os.getpid():
        return False
    if host == socket.gethostname() and not _running(process):
        return False
    try:
        touched = max(entry.stat().st_mtime for entry in (path, *path.iterdir()))
    except OSError:
        return True
    return time.time() - touched < LEFTOVER_SECONDS


def _running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
