"""bitsandbytes' paged 8-bit AdamW with a choice of bits for each parameter group.

bitsandbytes offers that choice only through a manager that is global to the process and keyed by object ids, so one
run's choice could leak into the next. Here it is an ordinary group option, `bits`, that this subclass reads. Paged state
lies in CUDA managed memory: the driver moves it to the host when the GPU is full. Not so on a CPU, where it is refused.
"""

from __future__ import annotations

from typing import Any

import bitsandbytes


class PagedAdamW8bit(bitsandbytes.optim.PagedAdamW8bit):
    """PagedAdamW8bit whose groups may hold `bits`: 8 or 32. Tensors under 4096 elements are in 32 bits in either."""

    def get_config(self, gindex: int, pindex: int, group: dict[str, Any]) -> dict[str, Any]:
        config = super().get_config(gindex, pindex, group)
        config["optim_bits"] = group.get("bits", config["optim_bits"])
        return config
