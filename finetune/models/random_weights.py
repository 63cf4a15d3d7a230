"""Models of a published shape with random weights: made where they are used, in the type they are used in, from no file.

For plans, benchmarks and tests of a size whose real weights are not at hand; what such a model learns means nothing.
models/skeleton puts each weight in place as soon as it is drawn.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from finetune.models.skeleton import Host, Making, furnish, skeleton

__all__ = ["SPREAD", "Making", "make"]

SPREAD = 0.02
"""Standard deviation of matrices, as Llama and Qwen2 begin."""


def make(
    config: Any,
    making: Making,
    store: Callable[[nn.Linear], nn.Module] | None = None,
    host: Host | None = None,
) -> Any:
    """A transformers causal LM: matrices normal with spread 0.02, norms 1, biases 0.

    Each weight is drawn by the seed and its own name alone, so every rank gets the same bits, and a model of fewer
    blocks has the first blocks of the whole one. Another kind of device draws other numbers. `store` turns each linear
    of the blocks into its stored form as soon as it is made; `host` is handed each block when it is whole, in order.
    """
    return furnish(skeleton(config, making), making, _Drawn(making), store, host)


class _Drawn:
    into = None

    def __init__(self, making: Making) -> None:
        self.making = making

    def made(self, name: str, leaf: str, shape: torch.Size) -> Tensor:
        making = self.making
        if len(shape) < 2:
            return torch.full(shape, float(leaf != "bias"), dtype=making.dtype, device=making.device)
        digest = hashlib.sha256(f"{making.seed}:{name}".encode()).digest()
        generator = torch.Generator(making.device).manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        return torch.empty(shape, dtype=making.dtype, device=making.device).normal_(std=SPREAD, generator=generator)
