"""Packing: which documents share a row. Best fit, longest first, which leaves few per cent of a row empty.

A document goes into the row with the least room that still takes it. Rows are found through a bit set of the rooms
there are, so a million documents take seconds; the result depends on nothing but the lengths.
"""

from __future__ import annotations

from collections.abc import Sequence


def pack(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Rows of document indices, each row's lengths summing to at most `max_tokens`; each index appears once.

    Documents of a row are in source order, rows in the order of their first documents. ValueError for a document longer
    than `max_tokens` or of no length.
    """
    for index, length in enumerate(lengths):
        if not 0 < length <= max_tokens:
            raise ValueError(f"document {index} has {length} tokens; a row takes 1 to {max_tokens}")
    max_tokens = min(max_tokens, sum(lengths))  # one row takes them all: a larger limit only makes the bit set longer
    rows: list[list[int]] = []
    by_room: dict[int, list[int]] = {}
    rooms = 0  # bit r is set when by_room[r] is not empty
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        length = int(lengths[index])
        fitting = rooms >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1
            row = by_room[room].pop()
            if not by_room[room]:
                rooms &= ~(1 << room)
        else:
            room, row = max_tokens, len(rows)
            rows.append([])
        rows[row].append(index)
        left = room - length
        if left:
            by_room.setdefault(left, []).append(row)
            rooms |= 1 << left
    return sorted((sorted(row) for row in rows), key=lambda row: row[0])
