"""A frozen linear layer whose weight is stored in 8 bits and decoded at each use: rowwise int8 or rowwise fp8 (e4m3).

Storage only: products are made in the precision of the input with the decoded weight, so the layer computes exactly
what a plain linear of `decoded(...)` computes, on any device, and a merge starts from that same matrix. (LLM.int8 rounds
the inputs as well.) A row's scale maps its largest magnitude to the largest code. Backward decodes again instead of
keeping the decoded weight: 8 bits a parameter and 4 bytes a row are all that stays.

Legend: N positions, I inputs, O outputs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

LARGEST = {"int8": 127.0, "fp8": 448.0}
"""The largest code of each kind: 127 keeps int8 symmetric, 448 is e4m3's largest number."""

CODES = {"int8": torch.int8, "fp8": torch.uint8}
ROWS = 1024
"""Rows that are encoded at once."""


def encoded(weight_OI: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """One byte an element [O, I] and a fp32 scale a row [O, 1], each element rounded to the nearest code.

    fp8 codes are held as uint8, so that no cast of a module to another floating type reaches them.
    """
    codes_OI = torch.empty(weight_OI.shape, dtype=CODES[kind], device=weight_OI.device)
    scale_O1 = torch.empty((len(weight_OI), 1), dtype=torch.float32, device=weight_OI.device)
    # A few rows at a time: the fp32 copies of a whole matrix would be larger than a block.
    for start in range(0, len(weight_OI), ROWS):
        rows = slice(start, start + ROWS)
        codes_OI[rows], scale_O1[rows] = _encoded_rows(weight_OI[rows].detach().float(), kind)
    return codes_OI, scale_O1


def _encoded_rows(full_OI: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    largest_O1 = full_OI.abs().amax(dim=1, keepdim=True)
    scale_O1 = torch.where(largest_O1 > 0, largest_O1 / LARGEST[kind], torch.ones_like(largest_O1))
    codes_OI = full_OI / scale_O1
    if kind == "int8":
        return codes_OI.round_().clamp_(-127, 127).to(torch.int8), scale_O1
    return codes_OI.clamp_(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8), scale_O1


def decoded_reference(codes_OI: Tensor, scale_O1: Tensor, kind: str, dtype: torch.dtype) -> Tensor:
    """The weight [O, I]: code times scale in fp32, rounded once to `dtype`."""
    values_OI = codes_OI if kind == "int8" else codes_OI.view(torch.float8_e4m3fn)
    return (values_OI.float() * scale_O1).to(dtype)


def decoded(codes_OI: Tensor, scale_O1: Tensor, kind: str, dtype: torch.dtype) -> Tensor:
    """The same bits without a fp32 copy of the matrix: codes are exact in `dtype`, the product is made in fp32."""
    values_OI = codes_OI if kind == "int8" else codes_OI.view(torch.float8_e4m3fn)
    return values_OI.to(dtype).mul_(scale_O1)


class _Product(torch.autograd.Function):
    """x W^T + b with W decoded in forward and again in backward; autograd keeps the codes, never W."""

    @staticmethod
    def forward(
        ctx: Any, x_NI: Tensor, codes_OI: Tensor, scale_O1: Tensor, bias_O: Tensor | None, facts: tuple[str, Any]
    ) -> Tensor:
        ctx.save_for_backward(codes_OI, scale_O1)
        ctx.facts = facts
        return functional.linear(x_NI, decoded(codes_OI, scale_O1, *facts).to(x_NI.dtype), bias_O)

    @staticmethod
    def backward(ctx: Any, grad_NO: Tensor) -> tuple[Tensor | None, None, None, None, None]:
        if not ctx.needs_input_grad[0]:
            return None, None, None, None, None
        codes_OI, scale_O1 = ctx.saved_tensors
        return grad_NO @ decoded(codes_OI, scale_O1, *ctx.facts).to(grad_NO.dtype), None, None, None, None


def squared_error(weight_OI: Tensor, stored: StoredLinear) -> tuple[Tensor, Tensor]:
    """Two fp32 scalars: the squares of what storing moved, and of the weight, summed over its elements."""
    lost, whole = (torch.zeros((), device=weight_OI.device) for _ in range(2))
    for start in range(0, len(weight_OI), ROWS):
        rows = slice(start, start + ROWS)
        full_OI = weight_OI[rows].detach().float()
        again_OI = decoded(stored.codes[rows], stored.scale[rows], stored.kind, stored.dtype)
        lost += (again_OI.float() - full_OI).square().sum()
        whole += full_OI.square().sum()
    return lost, whole


class StoredLinear(nn.Linear):
    """A frozen linear over stored codes. `weight` decodes anew at each reading, in the type that was stored.

    A subclass of nn.Linear, so that peft puts its layers around it as around any other; `codes` and `scale` are
    buffers, so it has no parameter that could be trained (a bias stays one, frozen).
    """

    codes: Tensor
    scale: Tensor

    def __init__(self, linear: nn.Linear, kind: str) -> None:
        nn.Module.__init__(self)  # nn.Linear's own would make a weight
        self.in_features, self.out_features, self.kind = linear.in_features, linear.out_features, kind
        self.dtype = linear.weight.dtype
        codes_OI, scale_O1 = encoded(linear.weight, kind)
        self.register_buffer("codes", codes_OI)
        self.register_buffer("scale", scale_O1)
        self.bias = None if linear.bias is None else nn.Parameter(linear.bias.detach(), requires_grad=False)

    @property
    def weight(self) -> Tensor:
        return decoded(self.codes, self.scale, self.kind, self.dtype)

    def forward(self, input: Tensor) -> Tensor:  # nn.Linear's name
        x, device = input, input.device.type
        if torch.is_autocast_enabled(device):
            x = x.to(torch.get_autocast_dtype(device))
        bias = self.bias if self.bias is None else self.bias.to(x.dtype)
        return _Product.apply(x, self.codes, self.scale, bias, (self.kind, self.dtype))

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, stored={self.kind}"
