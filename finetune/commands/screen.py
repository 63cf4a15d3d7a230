"""Where words print: rich tables for a person, pure JSON for a program."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

PIPE_WIDTH = 200


class Screen(Console):
    """A console that leaves a reader who went away (`| head`) to the command line, which ends quietly."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def show(*renderables: Any) -> None:
    """Prints for a person."""
    screen = Screen()
    if not screen.is_terminal:
        screen = Screen(width=PIPE_WIDTH)  # nothing is folded for a program or a file
    for renderable in renderables:
        screen.print(renderable)


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "item"):
        return value.item()
    raise TypeError(f"{type(value).__name__} has no JSON form")


def show_json(value: Any) -> None:
    """Prints one JSON value and nothing else. A number that is not finite is a fault of ours, not bad JSON."""
    print(json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False, default=_plain))


def table(columns: Sequence[str], rows: Sequence[Sequence[Any]], title: str | None = None) -> Table:
    """A plain table; None is shown as a dash, and text is not read as markup."""
    from rich.text import Text

    made = Table(title=title, box=None, pad_edge=False, title_justify="left", header_style="bold")
    for column in columns:
        made.add_column(column, overflow="fold")
    for row in rows:
        made.add_row(*(Text("-" if cell is None else figure(cell)) for cell in row))
    return made


def figure(value: Any) -> str:
    """A value as a person reads it."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.4f}" if abs(value) < 100 else f"{value:,.0f}"
    if isinstance(value, int):
        return f"{value:,}"
    return str(value)
