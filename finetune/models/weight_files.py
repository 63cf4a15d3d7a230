"""A checkpoint's safetensors files as tensors by name, read piece by piece into memory that is there already.

Plain reads at an offset, not a mapped file: a mapped file's pages count as this process's memory beside the place the
weights go to, and a file that shrinks under a mapping ends the process with a signal. Here it is a message. The header of
every file is checked against the file's size before anything is read.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from finetune.config.schema import ModelSection
from finetune.errors import ModelError
from finetune.models.source import SAFE, Source

FLOATING = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
BITS = {"BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "I16": 16, "U16": 16, "I32": 32, "U32": 32, "I64": 64,
        "U64": 64, "F16": 16, "BF16": 16, "F32": 32, "F64": 64}  # fmt: skip
"""Bits of an element by the name that safetensors gives its type; types that are not here are not checked for size."""
LARGEST_HEADER = 100_000_000
"""What safetensors itself accepts."""
PIECE = 16 * 2**20
"""Bytes that are read at once, and the size of the place where another type waits to be converted."""


@dataclass(frozen=True)
class Stored:
    """Where a tensor stands: bytes `start` to `stop` of `file`. `kind` is safetensors' name of the type."""

    file: Path
    kind: str
    shape: tuple[int, ...]
    start: int
    stop: int


class WeightFiles:
    """The tensors of a checkpoint by name. `read` counts bytes that came from disk; `converted` tensors and their bytes by
    (stored type, type they became). `told`, where set, is called with the bytes of each piece that was read."""

    def __init__(self, files: list[Path], index: Mapping[str, str] | None = None) -> None:
        self.tensors: dict[str, Stored] = {}
        self.read = 0
        self.converted: dict[tuple[str, torch.dtype], list[int]] = {}
        self.told: Callable[[int], None] | None = None
        for file in files:
            for name, stored in _header(file).items():
                if name in self.tensors and (index is None or index.get(name) not in (file.name, self._file(name))):
                    raise ModelError(
                        f"{name} stands in {self._file(name)} and in {file.name}, and nothing says which counts",
                        where=str(file.parent),
                        remedy="keep one of them, or name it in the index file",
                    )
                if name not in self.tensors or (index or {}).get(name) == file.name:
                    self.tensors[name] = stored
        for name, listed in (index or {}).items():
            if name not in self.tensors:
                raise ModelError(
                    f"the index says that {listed} holds {name}, but it does not",
                    where=str(files[0].parent),
                    remedy="copy or download the model again",
                )

    def _file(self, name: str) -> str:
        return self.tensors[name].file.name

    def tensor(self, name: str, dtype: torch.dtype) -> Tensor:
        """The tensor on the CPU, in a memory of its own, in `dtype`."""
        made = torch.empty(self.tensors[name].shape, dtype=dtype)
        self.into(name, made)
        return made

    @torch.no_grad()
    def into(self, name: str, target: Tensor) -> None:
        """Reads a tensor into `target` (on the CPU, contiguous, of its shape), rounded to its type on the way.

        ModelError, with the file's name, when the file ends early.
        """
        stored = self.tensors[name]
        kind = FLOATING[stored.kind]
        flat = target.detach().view(-1)
        try:
            with open(stored.file, "rb", buffering=0) as file:
                if kind == target.dtype:
                    self._fill(file.fileno(), stored, flat.view(torch.uint8), stored.start)
                else:
                    self._convert(file.fileno(), stored, flat, kind)
        except OSError as error:
            raise _broken(stored.file, f"cannot be read: {error.strerror}") from error
        if kind != target.dtype:
            count = self.converted.setdefault((stored.kind, target.dtype), [0, 0])
            count[0] += 1
            count[1] += stored.stop - stored.start

    def _convert(self, file: int, stored: Stored, flat: Tensor, kind: torch.dtype) -> None:
        each = PIECE // kind.itemsize
        waiting = torch.empty(min(each, flat.numel()), dtype=kind)
        for start in range(0, flat.numel(), each):
            piece = flat[start : start + each]
            part = waiting[: piece.numel()]
            self._fill(file, stored, part.view(torch.uint8), stored.start + start * kind.itemsize)
            piece.copy_(part)

    def _fill(self, file: int, stored: Stored, octets_N: Tensor, offset: int) -> None:
        octets: Any = octets_N.numpy()
        place = memoryview(octets)
        done = 0
        while done < len(place):
            count = os.preadv(file, [place[done : done + PIECE]], offset + done)
            if count == 0:
                raise _broken(stored.file, f"became shorter while it was read ({offset + done:,} bytes are left)")
            done += count
            self.read += count
            if self.told is not None:
                self.told(count)

    def notices(self) -> list[str]:
        """What was converted on the way, counted."""
        return [
            f"{count} tensors ({octets / 2**30:.2f} GiB stored) were turned from {kind.lower()} into "
            f"{str(dtype).removeprefix('torch.')} while they were read"
            for (kind, dtype), (count, octets) in self.converted.items()
        ]


def open_files(source: Source, section: ModelSection) -> WeightFiles:
    """The weight files of a model, found as transformers finds them, every header checked. ModelError by file name."""
    single, listed = (_resolved(source, section, name) for name in SAFE)
    if single is not None:
        return WeightFiles([single])
    if listed is None:
        raise ModelError(f"there are no weights in safetensors ({' or '.join(SAFE)})", source.name)
    try:
        index: dict[str, str] = json.loads(listed.read_text(encoding="utf-8"))["weight_map"]
        names = sorted(set(index.values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _broken(listed, "is no index of weight files") from error
    files = []
    for name in names:
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise ModelError(
                f"{listed.name} names {name!r}, which is no safetensors file beside it", str(listed.parent)
            )
        file = _resolved(source, section, name)
        if file is None:
            raise ModelError(f"{name} is missing", str(listed.parent), "copy or download the model again")
        files.append(file)
    return WeightFiles(files, index)


def _resolved(source: Source, section: ModelSection, name: str) -> Path | None:
    if not source.hub:
        path = Path(source.place) / name
        return path if path.is_file() else None
    from transformers.utils import cached_file

    found = cached_file(
        source.place,
        name,
        revision=section.revision or "main",
        local_files_only=source.offline,
        _raise_exceptions_for_missing_entries=False,
    )
    return None if found is None else Path(found)


def _header(path: Path) -> dict[str, Stored]:
    """The tensors that a file says it has; ModelError unless it is exactly as long as they need."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(LARGEST_HEADER, size - 8):
            raise _broken(path, f"is cut short or no safetensors file ({size:,} bytes, a header of {length:,})")
        try:
            facts: dict[str, Any] = json.loads(file.read(length))
            facts.pop("__metadata__", None)
            found = {name: _stored(path, fact, 8 + length) for name, fact in facts.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise _broken(path, "has a header that cannot be read") from error
    needed = max((stored.stop for stored in found.values()), default=8 + length)
    if needed > size:
        raise _broken(path, f"is cut short: its tensors need {needed:,} bytes, and it has {size:,}")
    return found


def _stored(path: Path, fact: dict[str, Any], start: int) -> Stored:
    first, last = fact["data_offsets"]
    stored = Stored(path, fact["dtype"], tuple(int(width) for width in fact["shape"]), start + first, start + last)
    bits = BITS.get(stored.kind)
    is_sound = 0 <= first <= last and all(width >= 0 for width in stored.shape)
    if not is_sound or (bits is not None and math.prod(stored.shape) * bits != 8 * (last - first)):
        raise ValueError("a tensor whose bytes do not fit its shape")
    return stored


def _broken(path: Path, what: str) -> ModelError:
    return ModelError(f"{path.name} {what}", str(path), "copy or download the file again")
