"""Any iteration, run ahead in a thread: what comes next is made while the present item is used."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

LOOK = 0.5
"""Seconds between two looks at whether the other side still lives."""

T = TypeVar("T")


class Ahead(Generic[T]):
    """Iterates `source` in a thread, at most `depth` items ahead. An error in it is raised where its item was due.

    Use it in a `with`: leaving ends the thread, whether all was taken or not.
    """

    def __init__(self, source: Iterable[T], depth: int, name: str) -> None:
        self._source = source
        self._items: queue.Queue[tuple[str, Any]] = queue.Queue(max(1, depth))
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        if self._thread is not threading.current_thread():
            self._thread.join(10 * LOOK)  # it is in the middle of an item at most; as a daemon it holds up no exit

    def _run(self) -> None:
        source = iter(self._source)
        try:
            for item in source:
                if not self._put("item", item):
                    break
            else:
                self._put("end", None)
        except BaseException as error:
            self._put("error", error)
        finally:
            close = getattr(source, "close", None)
            if close is not None:
                close()

    def _put(self, kind: str, value: Any) -> bool:
        while not self._ended.is_set():
            try:
                self._items.put((kind, value), timeout=LOOK)
                return True
            except queue.Full:
                continue
        return False

    def __iter__(self) -> Iterator[T]:
        while True:
            try:
                kind, value = self._items.get(timeout=LOOK)
            except queue.Empty:
                if not self._thread.is_alive() and self._items.empty():
                    raise RuntimeError(f"the thread {self._thread.name!r} ended without a word") from None
                continue
            if kind == "end":
                return
            if kind == "error":
                raise value
            yield value
