"""RMS normalisation of rows, with the residual sum in front of it, forward and backward, one program a row.

Legend: N rows, D features.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

WIDEST = 65536
"""Features a row that one program holds."""
PARTS = 256
"""Programs that share the sum over rows of the gain's gradient."""


@triton.jit
def forward_kernel(
    x_pointer, add_pointer, sum_pointer, gain_pointer, out_pointer, scale_pointer, width, epsilon,
    ADD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    x = tl.load(x_pointer + row * width + columns, mask=inside, other=0.0)
    if ADD:
        added = tl.load(add_pointer + row * width + columns, mask=inside, other=0.0)
        x = (x.to(tl.float32) + added.to(tl.float32)).to(x.dtype)
        tl.store(sum_pointer + row * width + columns, x, mask=inside)
    dtype = x.dtype
    x = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 0) / width + epsilon)
    tl.store(scale_pointer + row, scale)
    gain = tl.load(gain_pointer + columns, mask=inside, other=0.0).to(tl.float32)
    out = (x * scale).to(dtype).to(tl.float32) * gain
    tl.store(out_pointer + row * width + columns, out.to(out_pointer.dtype.element_ty), mask=inside)


@triton.jit
def backward_kernel(
    x_pointer, gain_pointer, scale_pointer, grad_pointer, through_pointer, out_pointer, gain_grad_pointer, rows, width,
    rows_a_program, THROUGH: tl.constexpr, GAIN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    gain = tl.load(gain_pointer + columns, mask=inside, other=0.0).to(tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    first = tl.program_id(0).to(tl.int64) * rows_a_program
    for row in range(first, tl.minimum(first + rows_a_program, rows)):
        x = tl.load(x_pointer + row * width + columns, mask=inside, other=0.0).to(tl.float32)
        grad = tl.load(grad_pointer + row * width + columns, mask=inside, other=0.0).to(tl.float32)
        scale = tl.load(scale_pointer + row)
        normed = x * scale
        if GAIN:
            total += grad * normed
        grad = grad * gain
        out = scale * (grad - normed * (tl.sum(grad * normed, 0) / width))
        if THROUGH:
            out += tl.load(through_pointer + row * width + columns, mask=inside, other=0.0).to(tl.float32)
        tl.store(out_pointer + row * width + columns, out.to(out_pointer.dtype.element_ty), mask=inside)
    if GAIN:
        tl.store(gain_grad_pointer + tl.program_id(0) * width + columns, total, mask=inside)


def _launch(width: int) -> dict[str, int]:
    block = triton.next_power_of_2(width)
    return {"BLOCK": block, "num_warps": min(16, max(1, block // 512))}


def forward(
    x_ND: Tensor, add_ND: Tensor | None, gain_D: Tensor, epsilon: float, out_ND: Tensor
) -> tuple[Tensor, Tensor]:
    """(x + add, the rows' fp32 scales); its normed rows are written to `out_ND`. Without `add` the first is x itself."""
    rows, width = x_ND.shape
    scale_N = torch.empty(rows, dtype=torch.float32, device=x_ND.device)
    sum_ND = x_ND if add_ND is None else torch.empty_like(x_ND)
    forward_kernel[(rows,)](
        x_ND, add_ND, sum_ND, gain_D, out_ND, scale_N, width, epsilon, ADD=add_ND is not None, **_launch(width)
    )
    return sum_ND, scale_N


def backward(
    x_ND: Tensor, gain_D: Tensor, scale_N: Tensor, grad_ND: Tensor, through_ND: Tensor | None, gain_grad: bool
) -> tuple[Tensor, Tensor | None]:
    """The gradient of x in its dtype, `through` added (what reaches x past the norm), and the gain's in fp32."""
    rows, width = x_ND.shape
    out_ND = torch.empty_like(x_ND)
    each = triton.cdiv(rows, PARTS) if gain_grad else 1
    programs = triton.cdiv(rows, each)
    parts = torch.empty(programs, width, dtype=torch.float32, device=x_ND.device) if gain_grad else None
    backward_kernel[(programs,)](
        x_ND, gain_D, scale_N, grad_ND, through_ND, out_ND, parts, rows, width, each,
        THROUGH=through_ND is not None, GAIN=gain_grad, **_launch(width),
    )  # fmt: skip
    return out_ND, None if parts is None else parts.sum(0)
