"""What a person sees: lines, tables and the progress bar, on stderr so that stdout stays for results. Rank 0 speaks; the others are silent.

On a terminal a live bar; in a log file a line now and then, since a bar there is noise.
"""

from __future__ import annotations

import errno
import logging
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import IO, Any, cast

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from finetune.contracts import StepResult

SECONDS_BETWEEN_LINES = 10.0
WIDTH_OF_A_FILE = 120


def size(count: float) -> str:
    """Bytes as a person reads them: 4.9 GiB, 310 MiB."""
    for unit, scale in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= scale:
            value = count / scale
            return f"{value:.1f} {unit}" if value < 100 else f"{value:.0f} {unit}"
    return f"{count:.0f} B"


class Stderr:
    """stderr, whatever it is at the moment. A terminal that was closed (EIO) is a reader who left, like a closed pipe."""

    @property
    def _file(self) -> Any:
        return getattr(sys.stderr, "rich_proxied_file", sys.stderr)  # rich puts a proxy there while its bar is on

    @property
    def encoding(self) -> str:
        return str(self._file.encoding)

    def isatty(self) -> bool:
        return bool(self._file.isatty())

    def fileno(self) -> int:
        return int(self._file.fileno())

    def write(self, text: str) -> int:
        with _leaving():
            return int(self._file.write(text))

    def flush(self) -> None:
        with _leaving():
            self._file.flush()


@contextmanager
def _leaving() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        raise BrokenPipeError(errno.EPIPE, "the terminal was closed") from error


class Outliving(Console):
    """A console whose reader may leave: rich would end the program there, and with it hours of training unsaved. The run
    goes on without words; metrics.jsonl has what they would have said."""

    def on_broken_pipe(self) -> None:
        """Says nothing more, and points stderr at nowhere, so that nobody else's word ends the run either."""
        self.quiet = True
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stderr.fileno())
        os.close(nowhere)


def terminal() -> Console:
    """The console on stderr: as wide as the terminal, and 120 columns in a log file."""
    stderr = cast(IO[str], Stderr())
    console = Outliving(file=stderr, highlight=False)
    return console if console.is_terminal else Outliving(file=stderr, highlight=False, width=WIDTH_OF_A_FILE)


def quiet_libraries() -> None:
    """Keeps remarks of libraries that a user can do nothing about out of the output: optional kernels that are missing."""
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)


class Log:
    """Prints for rank 0 only; `quiet` prints nothing but warnings."""

    def __init__(self, speaks: bool = True, console: Console | None = None) -> None:
        self.speaks = speaks
        self.console = console or terminal()

    def say(self, content: Any = "") -> None:
        """A line or a rich renderable; plain text is printed as typed, without markup."""
        if self.speaks:
            self.console.print(
                Text(content) if isinstance(content, str) else content, soft_wrap=isinstance(content, str)
            )

    def notice(self, text: str) -> None:
        """Something the user should know and need not act on."""
        if self.speaks:
            self.console.print(Text.assemble(("note  ", "cyan"), text), soft_wrap=True)

    def warn(self, text: str) -> None:
        if self.speaks:
            self.console.print(Text.assemble(("warning  ", "yellow"), text), soft_wrap=True)

    def heading(self, text: str) -> None:
        if self.speaks:
            self.console.print(Text(text, style="bold"))


class StepProgress:
    """The bar of a training run: step, loss, tokens/s, memory, time left."""

    def __init__(self, log: Log, total: int, done: int = 0) -> None:
        self.log = log
        self.total = total
        self.live = log.speaks and log.console.is_terminal
        self.started = time.monotonic()
        self.first = done
        self.spoke = 0.0
        self.tokens = 0
        self.busy = 0.0
        self.bar = Progress(
            TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
            BarColumn(),
            TextColumn("{task.fields[figures]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=log.console,
            disable=not self.live,
        )
        self.row = self.bar.add_task("train", total=total, completed=done, figures="")

    def __enter__(self) -> StepProgress:
        self.bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bar.stop()

    def step(self, result: StepResult, memory_bytes: int) -> None:
        """Shows one finished optimizer step."""
        self.tokens += result.tokens
        self.busy += result.seconds
        speed = self.tokens / max(self.busy, 1e-9)
        figures = f"loss {result.loss:.4f}  {speed:,.0f} tok/s  {size(memory_bytes)}"
        self.bar.update(self.row, completed=result.step, figures=figures)
        if self.live or not self.log.speaks:
            return
        now = time.monotonic()
        if now - self.spoke >= SECONDS_BETWEEN_LINES or result.step in (self.first + 1, self.total):
            self.spoke = now
            left = (self.total - result.step) * (now - self.started) / max(result.step - self.first, 1)
            self.log.say(f"step {result.step}/{self.total}  {figures}  {left:,.0f} s left")


class BytesProgress:
    """How far bytes have come that take a while to arrive: a bar on a terminal, a line now and then elsewhere, and one line
    with the speed at the end. Call it with (bytes there, bytes of all)."""

    def __init__(self, log: Log, what: str) -> None:
        self.log = log
        self.what = what
        self.live = log.speaks and log.console.is_terminal
        self.started = self.spoke = time.monotonic()
        self.done = 0
        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[figures]}"),
            TimeElapsedColumn(),
            console=log.console,
            disable=not self.live,
            transient=True,
        )
        self.row = self.bar.add_task(what, total=None, figures="")

    def __enter__(self) -> BytesProgress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bar.stop()
        seconds = time.monotonic() - self.started
        if error is None and self.done:
            self.log.say(
                f"{self.what}: {size(self.done)} in {seconds:.1f} s ({size(self.done / max(seconds, 1e-9))}/s)"
            )

    def __call__(self, done: int, total: int) -> None:
        if not self.done:
            self.bar.start()  # not before: where nothing comes, nothing is shown
        self.done = done
        figures = f"{size(done)} of {size(total)}"
        self.bar.update(self.row, completed=done, total=total, figures=figures)
        now = time.monotonic()
        if not self.live and now - self.spoke >= SECONDS_BETWEEN_LINES:
            self.spoke = now
            self.log.say(f"{self.what}: {figures}")
