"""Packing: which documents share a row. Best fit, longest first, which leaves few per cent of a row empty.

A document goes into the row with the least room that still takes it. All documents of one length are placed together:
the row with the least room takes as many of them as go in, since with each it stays the one with the least room. So the
work is counted in (length, room) pairs rather than in documents, and a million documents take about a second. The
rooms that exist are a bit set. The result depends on nothing but the lengths.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

Groups = tuple[np.ndarray, np.ndarray]
"""Rows of documents: numbers of documents behind one another, int64 [documents], and where each row begins, int64 [rows + 1]."""


def pack(lengths: Sequence[int] | np.ndarray, max_tokens: int) -> list[list[int]]:
    """`pack_rows` as lists: the documents of each row."""
    order, cuts = pack_rows(lengths, max_tokens)
    numbers, bounds = order.tolist(), cuts.tolist()
    return [numbers[first:last] for first, last in pairwise(bounds)]


def pack_rows(lengths: Sequence[int] | np.ndarray, max_tokens: int) -> Groups:
    """Rows of documents, each row's lengths summing to at most `max_tokens`; each document stands in exactly one.

    Documents of a row are in source order, rows in the order of their first documents. ValueError for a document longer
    than `max_tokens` or of no length.
    """
    sizes = np.asarray(lengths, dtype=np.int64)
    bad = np.flatnonzero((sizes <= 0) | (sizes > max_tokens))
    if len(bad):
        raise ValueError(f"document {bad[0]} has {sizes[bad[0]]} tokens; a row takes 1 to {max_tokens}")
    if not len(sizes):
        return np.zeros(0, dtype=np.int64), np.zeros(1, dtype=np.int64)
    longest_first = np.argsort(-sizes, kind="stable")
    row_of = np.empty(len(sizes), dtype=np.int64)
    # One row takes them all: a larger limit only makes the bit set longer.
    row_of[longest_first] = _fit(sizes[longest_first], min(max_tokens, int(sizes.sum())))
    return _in_source_order(row_of)


def pack_parts(lengths: np.ndarray, max_tokens: int, part_of: np.ndarray) -> Groups:
    """`pack_rows` within each run of documents of one part (`part_of` ascends), so that no row mixes two parts."""
    starts = [0, *(np.flatnonzero(np.diff(part_of)) + 1).tolist(), len(lengths)]
    orders, cuts, done = [], [np.zeros(1, dtype=np.int64)], 0
    for first, last in pairwise(starts):
        order, own = pack_rows(lengths[first:last], max_tokens)
        orders.append(order + first)
        cuts.append(own[1:] + done)
        done += last - first
    return np.concatenate(orders), np.concatenate(cuts)


def _fit(sizes: np.ndarray, max_tokens: int) -> list[int]:
    """The row of each document; `sizes` descend."""
    row_of: list[int] = []
    by_room: dict[int, list[int]] = {}
    rooms, rows = 0, 0  # bit r of rooms is set when by_room[r] is not empty
    changes = np.flatnonzero(np.diff(sizes)) + 1
    starts = [0, *changes.tolist(), len(sizes)]
    lengths = sizes[starts[:-1]].tolist()
    for length, first, last in zip(lengths, starts, starts[1:], strict=False):
        left = last - first
        while left:
            fitting = rooms >> length
            if fitting:
                room = length + (fitting & -fitting).bit_length() - 1
                each = room // length
                held = by_room[room]
                taken = held[: -1 - min(len(held), -(-left // each)) : -1]
                del held[len(held) - len(taken) :]
                if not held:
                    rooms &= ~(1 << room)
            else:
                room, each = max_tokens, max_tokens // length
                taken = list(range(rows, rows + -(-left // each)))
                rows += len(taken)
            full = min(len(taken), left // each)
            placed = taken[:full] if each == 1 else [row for row in taken[:full] for _ in range(each)]
            parts = [(taken[:full], room - each * length)]
            if full < len(taken):
                some = left - full * each
                placed += [taken[full]] * some
                parts.append((taken[full:], room - some * length))
            row_of += placed
            left -= len(placed)
            for some_rows, room_left in parts:
                if room_left and some_rows:
                    by_room.setdefault(room_left, []).extend(some_rows)
                    rooms |= 1 << room_left
    return row_of


def _in_source_order(row_of: np.ndarray) -> Groups:
    """Rows renumbered by their first documents, and the documents of each in source order."""
    first_of = np.unique(row_of, return_index=True)[1]
    renumbered = np.empty(len(first_of), dtype=np.int64)
    renumbered[np.argsort(first_of)] = np.arange(len(first_of))
    row_of = renumbered[row_of]
    return np.argsort(row_of, kind="stable"), np.concatenate([[0], np.cumsum(np.bincount(row_of))])
