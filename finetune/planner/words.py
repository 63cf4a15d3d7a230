"""Bytes and sizes in words, as the reports print them."""

from __future__ import annotations


def size(count: int) -> str:
    """`1.50 GiB`, `23.4 MiB`, `512 B`; three figures."""
    for unit, width in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(count) >= width:
            amount = count / width
            return f"{amount:.{2 if abs(amount) < 10 else 1 if abs(amount) < 100 else 0}f} {unit}"
    return f"{count} B"
