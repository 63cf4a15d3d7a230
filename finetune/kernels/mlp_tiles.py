"""The gated MLP over a few tokens at a time, so that gate, up, their product and its gradient never stand for all tokens.

For a block that keeps nothing of its MLP: it runs again for backward. The rows are taken one after the other as tokens and
cut every `tile` of them; dropout still draws by a token's place in its own row. What is read is overwritten by what is
made of it. Outputs and the input's gradient are sums over features, of which a tile has all: the same bits where the matrix
product takes the same kernel (seen on a CPU from 16 tokens on), else the same to roundings. A weight's gradient is a sum
over tokens, which tiles add up one after the other: in fp32 for adapters, in the weight's own type for a trained weight,
as micro-batches are added. (fp32 sums for 16-bit weights would take 2 bytes more a weight of the MLP: as much as tiles free.)

Legend: N tokens, D hidden width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from finetune.kernels.adapted_linear import TENSORS, Grads
from finetune.kernels.gated_mlp import MlpLeaves, back, first_half, second_half


def forward_(x: Tensor, leaves: MlpLeaves, tile: int) -> Tensor:
    """The MLP's output for contiguous x [B, S, D], in x's memory; without autograd."""
    x_ND = x.view(-1, x.shape[-1])
    for part in _tiles(len(x_ND), tile):
        here = leaves.tile(part.start, x.shape[-2])
        x_ND[part] = second_half(first_half(x_ND[None, part], here), here)[0][0]
    return x


def backward_(
    grad: Tensor, x: Tensor, leaves: MlpLeaves, need: Sequence[bool], tile: int
) -> tuple[Tensor | None, Grads]:
    """(x's gradient in x's memory, the tensors' gradients) from the output's [B, S, D] of any floating type and the input.

    `need[0]` is x's, then TENSORS a leaf.
    """
    x_ND, grad_ND = x.view(-1, x.shape[-1]), grad.reshape(-1, grad.shape[-1])
    found: Grads = (None,) * len(leaves.all()) * TENSORS
    for part in _tiles(len(x_ND), tile):
        here, read = leaves.tile(part.start, x.shape[-2]), x_ND[None, part]
        slope, found = back(grad_ND[None, part].to(x.dtype), read, first_half(read, here), here, need, found)
        if slope is not None:
            x_ND[part] = slope[0]
        del slope
    return x if need[0] else None, found


def _tiles(tokens: int, tile: int) -> Iterator[slice]:
    return (slice(start, min(start + tile, tokens)) for start in range(0, tokens, tile))
