"""The text of a parameter group: `lr_factor=0.1 weight_decay=0`, one or both, as a recipe's value is text."""

from __future__ import annotations

import math

GROUP_CHANGES = ("lr_factor", "weight_decay")


def group_changes(text: str) -> dict[str, float]:
    """What a group's text says, as numbers by name. ValueError where it is not that."""
    found: dict[str, float] = {}
    for part in text.replace(",", " ").split():
        name, equals, value = part.partition("=")
        if name not in GROUP_CHANGES or not equals or name in found:
            raise ValueError(f"not one of {', '.join(GROUP_CHANGES)}, each given once")
        number = float(value)
        if not (math.isfinite(number) and number >= 0):
            raise ValueError("not a number of at least 0")
        found[name] = number
    if not found:
        raise ValueError("nothing is changed")
    return found
