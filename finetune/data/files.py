"""Which files a path means, and their bytes: patterns, compressed files, and what is no file to read at all.

Nothing is opened before it is known to be a regular file: opening a pipe would wait for ever, and a device need not end.
"""

from __future__ import annotations

import bz2
import difflib
import gzip
import lzma
import stat
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from finetune.environment import user_path
from finetune.errors import DataError

COMPRESSED = (".gz", ".xz", ".bz2", ".zst")
PIECE = 16 * 2**20
LARGEST_RATIO = 1000
"""A file that becomes more than this many times larger, and more than SMALL bytes, was made to fill the memory."""
SMALL = 2**30
MAGIC = "*?["
DECODERS: dict[str, Callable[[], Any]] = {".xz": lzma.LZMADecompressor, ".bz2": bz2.BZ2Decompressor}


def inner_suffix(file: Path) -> str:
    """The suffix that tells the format, without that of a compression: `.jsonl` of `a.jsonl.gz`."""
    return (file.with_suffix("") if file.suffix.lower() in COMPRESSED else file).suffix.lower()


def is_pattern(path: str) -> bool:
    """Whether a path that is no file of that very name is a pattern."""
    return any(sign in path for sign in MAGIC)


def matching(path: str) -> list[Path]:
    """The regular files that a pattern matches, by name; `**` goes into folders, and follows no links to folders.

    DataError when there are none.
    """
    whole = Path(path).expanduser()
    parts = whole.parts
    first = next(number for number, part in enumerate(parts) if is_pattern(part))
    base = Path(*parts[:first]) if first else Path()
    try:
        found = sorted(file for file in base.glob(str(Path(*parts[first:]))) if file.is_file())
    except (OSError, ValueError) as error:
        raise DataError(f"the pattern cannot be followed: {error}", where=path, remedy="check the path") from error
    if not found:
        raise DataError("no file matches the pattern", where=path, remedy=f"look into {base.resolve()}")
    return found


def check_regular(path: str, file: Path) -> None:
    """DataError for a pipe, a socket or a device; nothing is opened to find out."""
    mode = file.stat().st_mode
    kinds = {stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}
    kind = kinds.get(stat.S_IFMT(mode))
    if kind is not None:
        remedy = "write the rows to a file first: they are read more than once"
        raise DataError(f"this is {kind}, not a file", where=path, remedy=remedy)


def contents(path: str, file: Path) -> bytes:
    """All bytes of a file, decompressed. DataError where it cannot be read, is empty, is broken, or is made to explode."""
    try:
        check_regular(path, file)
        size = file.stat().st_size
        if size == 0:
            raise DataError("the file is empty (0 bytes)", where=path, remedy="give a file with at least one row")
        if file.suffix.lower() not in COMPRESSED:
            return file.read_bytes()
        return b"".join(_decompressed(path, file, size))
    except (EOFError, lzma.LZMAError, zlib.error, gzip.BadGzipFile) as error:
        raise _broken(path, file, error) from error
    except OSError as error:
        if error.errno is None:
            raise _broken(path, file, error) from error
        reason = error.strerror or str(error)
        raise DataError(f"cannot be read: {reason}", where=path, remedy="check the file's permissions") from error


def _broken(path: str, file: Path, error: Exception) -> DataError:
    reason = (str(error) or type(error).__name__).splitlines()[0]
    what = f"not a whole {file.suffix} file: {reason}"
    return DataError(what, where=path, remedy="it was cut off or is of another kind: copy or make it again")


def _decompressed(path: str, file: Path, size: int) -> Iterator[bytes]:
    total = 0
    for piece in _pieces(file):
        total += len(piece)
        if total > max(SMALL, LARGEST_RATIO * size):
            what = f"{size:,} bytes that become more than {total:,}"
            raise DataError(what, where=path, remedy="decompress it yourself if it is what you want")
        yield piece


def _pieces(file: Path) -> Iterator[bytes]:
    decoder = DECODERS.get(file.suffix.lower())
    if decoder is not None:
        with file.open("rb") as raw:
            yield from _streams(raw, decoder)
        return
    with _opened(file) as stream:
        while piece := stream.read(PIECE):
            yield piece


def _opened(file: Path) -> IO[bytes] | Any:
    if file.suffix.lower() == ".gz":
        return gzip.open(file, "rb")
    import pyarrow

    return pyarrow.CompressedInputStream(pyarrow.OSFile(str(file)), "zstd")


def _streams(raw: IO[bytes], new: Callable[[], Any]) -> Iterator[bytes]:
    """Compressed streams behind one another. What follows the first must be one too.

    lzma.open and bz2.open take anything that is none for the end, and rows behind a broken byte would be lost.
    """
    decoder, block = new(), raw.read(PIECE)
    while True:
        yield decoder.decompress(block, PIECE)
        if not decoder.eof:
            block = raw.read(PIECE) if decoder.needs_input else b""
            if decoder.needs_input and not block:
                raise EOFError("it ends inside a stream")
            continue
        block = _behind_padding(raw, decoder.unused_data, padded=new is lzma.LZMADecompressor)
        if not block:
            return
        decoder = new()


def _behind_padding(raw: IO[bytes], block: bytes, padded: bool) -> bytes:
    """The next bytes of a file; the .xz format lets zeros, a multiple of four, stand between streams."""
    zeros = 0
    while True:
        rest = block.lstrip(b"\0") if padded else block
        zeros += len(block) - len(rest)
        block = rest or raw.read(PIECE)
        if rest or not block:
            break
    if zeros % 4:
        raise EOFError(f"{zeros:,} zeros between or behind its streams")
    return block


def text(path: str, raw: bytes) -> str:
    """The bytes as text, without a byte-order mark; DataError with the line where it is not UTF-8."""
    if raw.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise DataError("the file is UTF-16", where=path, remedy="save it as UTF-8")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        what = f"not UTF-8 (byte 0x{raw[error.start]:02x})"
        raise DataError(what, where=f"{path} line {line}", remedy="save it as UTF-8") from error


def missing_error(path: str, file: Path) -> DataError:
    """What to say where there is nothing: the nearest name in that folder."""
    folder = file.parent
    if not folder.is_dir():
        remedy = "check the path, or give a hub id as org/name"
        return DataError("no such file, nor its folder", where=path, remedy=remedy)
    names = [item.name for item in folder.iterdir() if item.is_file()]
    near = difflib.get_close_matches(file.name, names, n=1, cutoff=0.5)
    remedy = f"did you mean {folder / near[0]}?" if near else f"look into {folder.resolve()}"
    return DataError("no such file", where=path, remedy=remedy)


def place(path: str) -> Path:
    """The path as the user wrote it. InputError for one that cannot be looked up (a loop of links, a null character)."""
    return user_path(path, path)
