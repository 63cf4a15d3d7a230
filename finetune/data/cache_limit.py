"""How much prepared data the cache keeps: the entries that were used the longest ago go first, and never one in use.

Whoever maps an entry holds a shared lock on its `.used` file until the rows are let go, and sets that file's date; the
kernel releases the lock of a process that dies. Whoever removes an entry first gets both of its locks without waiting: the
one under which it is made and looked up, and that of its users. Where files cannot be locked, nothing is removed.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

KEY_DIGITS = 32


class Held:
    """A shared lock on an entry's `.used` file, until it is closed or nobody holds it any more."""

    def __init__(self, descriptor: int) -> None:
        self.close = weakref.finalize(self, os.close, descriptor)


def in_use(entry: Path) -> Held | None:
    """Marks an entry as used now, and as in use for as long as what is returned is held. None where files cannot be
    locked or written: then nobody can remove anything there either."""
    try:
        descriptor = os.open(entry.with_suffix(".used"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError:
        return None
    held = Held(descriptor)
    try:
        os.utime(descriptor)
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        held.close()
        return None
    return held


def size(folder: Path) -> int:
    """Bytes of the files under a folder; 0 when there is none. What another process takes away meanwhile is not counted."""
    total = 0
    # os.walk passes over a folder that is gone when it is entered; Path.rglob raises there.
    for place, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                total += os.stat(os.path.join(place, name)).st_size
    return total


def make_room(folder: Path, limit: int) -> tuple[int, int]:
    """Removes entries of `folder` until all have at most `limit` bytes together, or only those in use are left.

    Returns how many were removed, and their bytes.
    """
    count = freed = 0
    with ExitStack() as held:
        try:
            # One at a time: two that count the same entries would each remove as many.
            fcntl.flock(held.enter_context((folder / "room.lock").open("ab")), fcntl.LOCK_EX)
        except OSError:
            return 0, 0
        sizes = {entry: size(entry) for entry in _entries(folder)}
        total = sum(sizes.values())
        for entry in sorted(sizes, key=_last_use):
            if total - freed <= limit:
                break
            if _remove(entry):
                count, freed = count + 1, freed + sizes[entry]
    return count, freed


def _entries(folder: Path) -> Iterator[Path]:
    for place in folder.iterdir() if folder.is_dir() else ():
        if len(place.name) == KEY_DIGITS and place.is_dir():
            yield place


def _last_use(entry: Path) -> tuple[float, str]:
    """When the entry was opened last; for one of an older version, when it was made."""
    for file in (entry.with_suffix(".used"), entry):
        with suppress(OSError):
            return file.stat().st_mtime, entry.name
    return 0.0, entry.name


def _remove(entry: Path) -> bool:
    """Whether the entry was removed: nobody makes it, looks for it or uses it."""
    with ExitStack() as held:
        try:
            for kind in (".lock", ".used"):
                file = held.enter_context(entry.with_suffix(kind).open("ab"))
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            gone = entry.with_name(f"{entry.name}.old-{os.getpid()}")
            shutil.rmtree(gone, ignore_errors=True)
            entry.rename(gone)  # whole or not at all, for whoever comes next
        except OSError:
            return False
        shutil.rmtree(gone, ignore_errors=True)
        # The two lock files stay: another process may be waiting on them, and a new file would be another lock.
        return True
