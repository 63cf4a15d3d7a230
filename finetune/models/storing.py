"""The linears of a model's blocks put into 8-bit storage, one at a time, and how far that moved their weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from finetune.errors import ModelError
from finetune.kernels.stored_linear import StoredLinear, squared_error
from finetune.models.decoder import find_blocks

STORED = ("int8", "fp8")
"""Values of model.base that kernels/stored_linear holds."""


class Storing:
    """Turns linears into stored ones (`kind` int8 or fp8), and keeps count of what the rounding changed."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.layers = 0
        self._lost = 0.0
        self._whole = 0.0

    @torch.no_grad()
    def __call__(self, linear: nn.Linear) -> StoredLinear:
        """The layer in its stored form, on the same device."""
        stored = StoredLinear(linear, self.kind)
        lost, whole = squared_error(linear.weight, stored)
        self._lost, self._whole = self._lost + lost.item(), self._whole + whole.item()
        self.layers += 1
        return stored

    def blocks(self, base: nn.Module, device: torch.device, home: torch.device) -> None:
        """Stores every linear of the blocks on `device`, one at a time, wherever the model stands now; they end on `home`."""
        for name in block_weights(base):
            linear: Any = base.get_submodule(name)
            base.set_submodule(name, self(linear.to(device)).to(home))

    def report(self, base: nn.Module) -> list[str]:
        """The notice: how many layers, how far their weights moved, and what keeps its precision, by name."""
        if not self.layers:
            raise ModelError(
                f"{type(base).__name__} has no linear layer that can be stored in {self.kind}",
                remedy="set model.base=same",
            )
        error = (self._lost / self._whole) ** 0.5 if self._whole else 0.0
        others = [
            f"{name} ({str(child.weight.dtype).removeprefix('torch.')})"
            for name, child in base.named_modules()
            if isinstance(child, nn.Linear | nn.Embedding) and not isinstance(child, StoredLinear)
        ]
        return [
            f"{self.layers} linear layers are stored in {self.kind}, a scale a row, and decoded at each use; the rounding "
            f"moved their weights by {error:.2%} (root mean square); not quantised: {', '.join(others)}"
        ]


def block_weights(base: nn.Module) -> list[str]:
    """Full names of the blocks' plain linear layers: those that a stored base stores."""
    inside = {id(child) for block in find_blocks(base) for child in block.modules() if type(child) is nn.Linear}
    return [name for name, child in base.named_modules() if id(child) in inside]
