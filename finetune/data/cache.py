"""Prepared data kept on disk, so that a second start maps them instead of tokenising again.

An entry is a folder `data/KEY` of plain .npy arrays and one facts.json. The key is a hash of everything that the rows
depend on: the files' contents, template, tokenizer, settings, and this program's own code. An entry is written beside
its place and renamed into it, so it is there whole or not at all; a lock that the kernel releases when its holder dies
keeps two processes from doing the same work. Its checksums are compared at every start: a broken entry is made anew.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

import numpy as np

from finetune.data.cache_limit import in_use
from finetune.data.preflight import DataReport
from finetune.data.rows import RowSet, Splits

FACTS = "facts.json"
CHECKED = 16 * 2**20
"""Bytes of an array that are summed at a time."""


class BrokenCacheError(Exception):
    """An entry that is not what was written; the text says in what."""


def key_of(facts: Mapping[str, Any]) -> str:
    """The name of an entry: 32 hex digits over everything in `facts`."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:32]


def code_digest() -> str:
    """A hash of this room's source text: rows made by other code are other rows."""
    digest = hashlib.sha256()
    for file in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(file.name.encode() + file.read_bytes())
    return digest.hexdigest()


def tokenizer_digest(tokenizer: Any) -> str:
    """A hash of what a fast tokenizer does: its engine, its chat template, its special tokens."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    parts = (
        type(tokenizer).__name__,
        backend.to_str() if backend is not None else repr(sorted(tokenizer.get_vocab().items())),
        repr(tokenizer.chat_template),
        repr(sorted(tokenizer.special_tokens_map.items(), key=str)),
        str(tokenizer.model_max_length),
        tokenizer.name_or_path,
    )
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def file_digest(path: Path) -> str:
    """SHA-256 of a file, or of every file of a folder with its name."""
    if path.is_dir():
        inside = sorted(file for file in path.rglob("*") if file.is_file())
        listed = [f"{file.relative_to(path)} {file_digest(file)}" for file in inside]
        return hashlib.sha256("\n".join(listed).encode()).hexdigest()
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def text_digest(texts: Iterable[str]) -> str:
    """SHA-256 of texts in their order, each with its length, so that no two lists are the same bytes."""
    digest = hashlib.sha256()
    for text in texts:
        raw = text.encode("utf-8", "surrogatepass")
        digest.update(f"{len(raw)} ".encode() + raw)
    return digest.hexdigest()


@contextmanager
def locked(entry: Path) -> Iterator[None]:
    """Holds the entry's lock; another process that wants it waits. Where files cannot be locked, nobody waits.

    Two writers then do the same work, and the renaming lets one of them win.
    """
    entry.parent.mkdir(parents=True, exist_ok=True)
    with entry.with_suffix(".lock").open("w") as file:
        with suppress(OSError):  # a network folder without locks
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def save(entry: Path, splits: Splits) -> None:
    """Writes an entry whole, in the place of whatever is there. Raises OSError where it cannot be written."""
    for left in entry.parent.glob(f"{entry.name}.writing-*"):
        if not _alive(left.suffix.removeprefix(".writing-")):
            shutil.rmtree(left, ignore_errors=True)
    place = entry.with_name(f"{entry.name}.writing-{os.getpid()}")
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    try:
        sets = {"train": splits.train, **{f"evaluate {name}": rows for name, rows in splits.evaluate.items()}}
        facts = {
            "sets": [_save_set(place, str(number), name, rows) for number, (name, rows) in enumerate(sets.items())]
        }
        _write(place / FACTS, json.dumps({**facts, "sum": key_of(facts)}).encode())
        _replace(place, entry)
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _save_set(place: Path, number: str, name: str, rows: RowSet) -> dict[str, Any]:
    arrays = {}
    for kind, array in rows.arrays.items():
        file = place / f"{number}.{kind}.npy"
        with file.open("wb") as out:
            _write_array(out, np.ascontiguousarray(array))
            out.flush()
            os.fsync(out.fileno())
        arrays[kind] = {"file": file.name, "bytes": file.stat().st_size, "sum": _sum(file)}
    return {"name": name, "arrays": arrays, "parts": rows.parts, "report": asdict(rows.report)}


def _write_array(out: IO[bytes], array: np.ndarray) -> None:
    """As numpy.save, whose OSError of a full disk says neither that nor a number."""
    np.lib.format.write_array_header_1_0(out, np.lib.format.header_data_from_array_1_0(array))
    out.write(array.reshape(-1).view(np.uint8).data)


def _write(file: Path, content: bytes) -> None:
    with file.open("wb") as out:
        out.write(content)
        out.flush()
        os.fsync(out.fileno())


def _replace(place: Path, entry: Path) -> None:
    """Renames a finished folder to its place; a folder that stands there is taken away first."""
    if entry.exists():
        old = entry.with_name(f"{entry.name}.old-{os.getpid()}")
        shutil.rmtree(old, ignore_errors=True)
        entry.rename(old)
        shutil.rmtree(old, ignore_errors=True)
    try:
        place.rename(entry)
    except OSError:
        if not (entry / FACTS).is_file():  # else another process was first, with the same content
            raise


def _alive(process: str) -> bool:
    """Whether a process of this machine lives; its number may have been given to another since, which only delays."""
    try:
        os.kill(int(process), 0)
    except (ValueError, ProcessLookupError):
        return False
    except PermissionError:
        return True
    return True


def load(entry: Path) -> Splits | None:
    """The entry's rows, mapped from their files, and in use while they are held; None when there is no entry. BrokenCacheError for one that is not whole."""
    if not entry.is_dir():
        return None
    try:
        facts = json.loads((entry / FACTS).read_bytes())
        if facts.pop("sum", None) != key_of(facts):
            raise BrokenCacheError(f"{FACTS} was changed")
        sets = {each["name"]: _load_set(entry, each) for each in facts["sets"]}
        train = sets.pop("train")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise BrokenCacheError(f"{type(error).__name__}: {error}".splitlines()[0]) from error
    return Splits(train, {name.removeprefix("evaluate "): rows for name, rows in sets.items()}, in_use(entry))


def _load_set(entry: Path, facts: Mapping[str, Any]) -> RowSet:
    arrays = {}
    for kind, about in facts["arrays"].items():
        file = entry / Path(about["file"]).name
        if file.stat().st_size != about["bytes"]:
            raise BrokenCacheError(f"{file.name} has {file.stat().st_size:,} bytes, not {about['bytes']:,}")
        if _sum(file) != about["sum"]:
            raise BrokenCacheError(f"{file.name} was changed: its checksum differs")
        array = np.load(file, mmap_mode="r", allow_pickle=False)
        arrays[kind] = array
    report = DataReport(**_frozen(facts["report"]))
    return RowSet.of_arrays(arrays, report, [(name, first) for name, first in facts["parts"]])


def _frozen(value: Any) -> Any:
    """JSON's lists as tuples, as the report has them."""
    if isinstance(value, dict):
        return {name: _frozen(each) for name, each in value.items()}
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


def _sum(file: Path) -> int:
    total = 0
    with file.open("rb") as opened:
        while block := opened.read(CHECKED):
            total = zlib.crc32(block, total)
    return total
