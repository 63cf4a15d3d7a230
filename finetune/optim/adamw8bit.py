"""bitsandbytes' 8-bit AdamW with a choice of bits for each parameter group.

bitsandbytes offers that choice only through a manager that is global to the process and keyed by object ids, so one
run's choice could leak into the next. Here it is an ordinary group option, `optim_bits`, that this subclass reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import bitsandbytes


class AdamW8bit(bitsandbytes.optim.AdamW8bit):
    """AdamW8bit whose groups may hold `optim_bits`: 8 or 32. Tensors under 4096 elements are in 32 bits in either."""

    def get_config(self, gindex: int, pindex: int, group: dict[str, Any]) -> dict[str, Any]:
        config = super().get_config(gindex, pindex, group)
        config["optim_bits"] = group.get("optim_bits", config["optim_bits"])
        return config


def split_by_bits(groups: list[dict[str, Any]], full_roles: Sequence[str]) -> list[dict[str, Any]]:
    """Each group (of `parameter_groups`) cut in two: tensors with 8-bit state, then those whose role keeps 32 bits."""
    split = []
    for group in groups:
        for bits in (8, 32):
            chosen = [i for i, role in enumerate(group["roles"]) if (32 if role in full_roles else 8) == bits]
            if chosen:
                kept = {key: [group[key][i] for i in chosen] for key in ("params", "names", "roles")}
                split.append({**group, **kept, "optim_bits": bits})
    return split
