"""One process at a time in a run folder: two that train there would mix their steps and delete each other's checkpoints.

The lock is the system's own on an open file, so it ends with its process, however that ends; the file only carries it
and says whose it is.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from finetune.checkpoint.folders import writing
from finetune.errors import CheckpointError

LOCK = ".lock"
TAKEN = (errno.EWOULDBLOCK, errno.EACCES)
UNKNOWN = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EBADF)
"""What a file system says that has no locks."""


@contextmanager
def held(folder: Path) -> Iterator[str]:
    """Makes `folder` and holds it until left; yields a notice where the file system knows no locks, else an empty text.

    CheckpointError names the process that has it. The lock's file is deleted at the end, and so is a folder that is
    still empty then.
    """
    path = folder / LOCK
    with writing(path):
        folder.mkdir(parents=True, exist_ok=True)
        descriptor, notice = _take(path)
    try:
        yield notice
    finally:
        with suppress(OSError):
            path.unlink()
            folder.rmdir()
        os.close(descriptor)


@contextmanager
def alone(path: Path) -> Iterator[bool]:
    """True where no other process is inside at the moment; false at once where one is. Ends with its process."""
    import fcntl

    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    mine = True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        mine = error.errno not in TAKEN
    try:
        yield mine
    finally:
        if mine:
            with suppress(OSError):
                path.unlink()
        os.close(descriptor)


def _take(path: Path) -> tuple[int, str]:
    import fcntl

    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The one who had it may have deleted the file since it was opened here: then this is no lock at all.
            if path.exists() and os.fstat(descriptor).st_ino == path.stat().st_ino:
                os.truncate(descriptor, 0)
                os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
                return descriptor, ""
        except OSError as error:
            owner = os.read(descriptor, 200).decode(errors="replace").strip()
            if error.errno in UNKNOWN:
                return descriptor, f"the file system of {path.parent} knows no locks: let no other run use this folder"
            os.close(descriptor)
            if error.errno not in TAKEN:
                raise
            raise CheckpointError(
                f"another run is at work in this folder ({owner or 'owner unknown'})",
                str(path.parent),
                "wait for it or stop it, or give another run.dir",
            ) from error
        os.close(descriptor)
