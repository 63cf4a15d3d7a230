"""bitsandbytes' paged 8-bit AdamW with a choice of bits for each parameter group.

bitsandbytes offers that choice only through a manager that is global to the process and keyed by object ids, so one
run's choice could leak into the next. Here it is an ordinary group option, `bits`, that this subclass reads. Paged state
lies in CUDA managed memory: the driver moves it to the host when the GPU is full. Not so on a CPU, where it is refused.
"""

from __future__ import annotations

from typing import Any

import bitsandbytes
import torch
from torch import Tensor, nn

STATES = ("state1", "state2")


class PagedAdamW8bit(bitsandbytes.optim.PagedAdamW8bit):
    """PagedAdamW8bit whose groups may hold `bits`: 8 or 32. Tensors under 4096 elements are in 32 bits in either."""

    def get_config(self, gindex: int, pindex: int, group: dict[str, Any]) -> dict[str, Any]:
        config = super().get_config(gindex, pindex, group)
        config["optim_bits"] = group.get("bits", config["optim_bits"])
        return config

    def update_step(self, group: dict[str, Any], p: nn.Parameter, gindex: int, pindex: int) -> None:
        """As bitsandbytes', after states that a checkpoint gave back as plain tensors were moved into paged memory again."""
        state = self.state[p]
        for name in STATES:
            held = state.get(name)
            if isinstance(held, Tensor) and p.is_cuda and not getattr(held, "is_paged", False):
                buffer = self.get_state_buffer(p, dtype=held.dtype)
                # Small tensors are never paged, and their buffer is a plain one.
                if getattr(buffer, "is_paged", False):
                    torch.cuda.synchronize(p.device)  # the buffer is filled on the GPU and written from the host
                    state[name] = buffer.copy_(held)
        super().update_step(group, p, gindex, pindex)
