"""The norm of a gradient: one function for all of a step's ways, so that a clip's factor does not depend on where tensors live.

A tall matrix (embedding, head) is never whole on the device when it is streamed, so its norm is that of its parts' norms,
cut at the same rows everywhere. The file imports no torch by itself, since cost models count parts too.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

TALL_ELEMENTS = 2**25
"""Elements of one part of a tall matrix: 64 MiB in 16 bits."""


def tall_rows(rows: int, width: int) -> int:
    """Rows of one part of a [rows, width] matrix: a multiple of 256, so that parts start at the edges of coded blocks."""
    return min(rows, max(256, TALL_ELEMENTS // width // 256 * 256))


def parts_of(gradient: Tensor) -> list[Tensor]:
    """The tensor, or the parts of a tall matrix."""
    if gradient.dim() != 2 or gradient.numel() <= TALL_ELEMENTS:
        return [gradient]
    return list(gradient.split(tall_rows(*gradient.shape)))


def tensor_norm(gradient: Tensor) -> Tensor:
    """The fp32 norm of one gradient. 16-bit values are widened inside the sum: no fp32 copy is made."""
    return joined(_norm(part) for part in parts_of(gradient))


def joined(norms: Iterable[Tensor]) -> Tensor:
    """The norm of a tensor whose parts have these norms."""
    import torch

    several = list(norms)
    return several[0] if len(several) == 1 else torch.linalg.vector_norm(torch.stack(several))


def _norm(gradient: Tensor) -> Tensor:
    import torch

    if gradient.dtype == torch.float32:
        (norm,) = torch._foreach_norm([gradient])
        return norm
    return torch.linalg.vector_norm(gradient, dtype=torch.float32)


def tensor_norms(gradients: Iterable[Tensor]) -> Tensor:
    """The norm of each gradient in the order given, [P], on the gradients' device."""
    import torch

    several = list(gradients)
    if not several:
        return torch.zeros(0)
    small = [gradient for gradient in several if gradient.dtype == torch.float32 and len(parts_of(gradient)) == 1]
    together = dict(zip(map(id, small), torch._foreach_norm(small), strict=True)) if small else {}
    return torch.stack([together[id(each)] if id(each) in together else tensor_norm(each) for each in several])
