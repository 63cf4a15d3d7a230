"""Codes for optimizer states: what 8, 4 and fp8 bits keep of a mean and of a mean square, by blocks with one fp32 scale each.

Values are divided by their block's largest magnitude, bent by a root, and rounded to whole codes. The root decides what a
step looks like, since AdamW divides by the root of the mean square: bitsandbytes' table has a code for zero, and a small
mean square that falls on it makes a step of any size; here the smallest code is never zero. Where a root of the value is
coded, the relative error is nearly the same over many decades. Which root fits which width was measured (docs/lab_log.md).

Only additions, multiplications, divisions, square roots and rounding to whole numbers are used, each exact to the last bit
by IEEE 754, in an order that is written down. So this file and the Triton kernel (fused/adamw) give the same codes.

Legend: N elements of a flat slice, R blocks, B elements of a block.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

FP8_LARGEST = 448.0
FP8_SMALLEST = 2.0**-9
"""The smallest magnitude of float8 e4m3 above zero."""

SMALLEST_SCALE = 1e-37
"""A block whose largest magnitude is below this counts as zeros."""


@dataclass(frozen=True)
class StateFormat:
    """How the states of one tensor are stored. `number` names it inside the kernel; `block` is 0 where values are plain fp32.

    `encode_*` take values in [-1, 1] (means) or [0, 1] (squares) and give whole codes (int32); `decode_*` take codes.
    """

    name: str
    number: int
    block: int
    bits: int
    encode_mean: Callable[[Tensor], Tensor] | None = None
    decode_mean: Callable[[Tensor], Tensor] | None = None
    encode_square: Callable[[Tensor], Tensor] | None = None
    decode_square: Callable[[Tensor], Tensor] | None = None

    def code_bytes(self, elements: int) -> int:
        """Bytes of one state's values or codes."""
        return -(-elements * self.bits // 8)

    def scale_count(self, elements: int) -> int:
        """Scales (fp32) of one state."""
        return -(-elements // self.block) if self.block else 0

    def state_bytes(self, elements: int) -> int:
        """Bytes of one state of a tensor of `elements`."""
        return self.code_bytes(elements) + 4 * self.scale_count(elements)


def root(x: Tensor) -> Tensor:
    """The square root of fp32 values, rounded to the letter. torch's own on a CPU is a unit off here and there; by way of
    fp64, whose roots have more than twice the bits, it is right (Figueroa 1995, When is double rounding innocuous?)."""
    return x.double().sqrt_().float() if x.device.type == "cpu" else x.sqrt()


def _encode_mean_8(x: Tensor) -> Tensor:
    whole = root(root(x.abs())).mul_(127.0).round_()
    return torch.where(x < 0, -whole, whole).to(torch.int32) + 127


def _decode_mean_8(codes: Tensor) -> Tensor:
    bent = (codes - 127).float().mul_(1 / 127)
    squared = bent.abs().mul_(bent.abs())
    return squared.mul_(squared).copysign_(bent)


def _encode_square_8(x: Tensor) -> Tensor:
    return root(root(root(x))).mul_(255.0).round_().clamp_(min=1.0).to(torch.int32)


def _decode_square_8(codes: Tensor) -> Tensor:
    bent = codes.float().mul_(1 / 255)
    for _ in range(3):
        bent = bent.mul_(bent)
    return bent


def _encode_mean_4(x: Tensor) -> Tensor:
    whole = root(x.abs()).mul_(7.0).round_()
    return torch.where(x < 0, -whole, whole).to(torch.int32) + 8


def _decode_mean_4(codes: Tensor) -> Tensor:
    bent = (codes - 8).float().mul_(1 / 7)
    return bent * bent.abs()


def _encode_square_4(x: Tensor) -> Tensor:
    return root(x).mul_(16.0).round_().clamp_(min=1.0).to(torch.int32) - 1


def _decode_square_4(codes: Tensor) -> Tensor:
    bent = (codes + 1).float().mul_(1 / 16)
    return bent.mul_(bent)


def fp8_code(x: Tensor) -> Tensor:
    """The e4m3 code (int32, 0..127) of magnitudes up to 448, to the nearest, halfway to even: as torch's own cast."""
    bits = x.contiguous().view(torch.int32)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    # At 2**14 the step of fp32 is 2**-9, that of e4m3's smallest numbers.
    small = (x + 16384.0).view(torch.int32) & 0xFF
    return torch.where(x < 2.0**-6, small, normal)


def fp8_value(codes: Tensor) -> Tensor:
    """The magnitude of e4m3 codes 0..126 (int32)."""
    normal = ((codes << 20) + (120 << 23)).view(torch.float32)
    return torch.where(codes < 8, codes.float() * FP8_SMALLEST, normal)


def _encode_mean_fp8(x: Tensor) -> Tensor:
    return fp8_code(x.abs().mul_(FP8_LARGEST)) + torch.where(x < 0, 128, 0).to(torch.int32)


def _decode_mean_fp8(codes: Tensor) -> Tensor:
    value = fp8_value(codes & 127).mul_(1 / FP8_LARGEST)
    return torch.where(codes >= 128, -value, value)


def _encode_square_fp8(x: Tensor) -> Tensor:
    return fp8_code(root(x).mul_(FP8_LARGEST).clamp_(min=FP8_SMALLEST))


def _decode_square_fp8(codes: Tensor) -> Tensor:
    root = fp8_value(codes).mul_(1 / FP8_LARGEST)
    return root.mul_(root)


FORMATS: dict[str, StateFormat] = {
    "fp32": StateFormat("fp32", 0, 0, 32),
    "8bit": StateFormat("8bit", 1, 256, 8, _encode_mean_8, _decode_mean_8, _encode_square_8, _decode_square_8),
    "4bit": StateFormat("4bit", 2, 64, 4, _encode_mean_4, _decode_mean_4, _encode_square_4, _decode_square_4),
    "fp8": StateFormat("fp8", 3, 256, 8, _encode_mean_fp8, _decode_mean_fp8, _encode_square_fp8, _decode_square_fp8),
}


def encode(x_N: Tensor, form: StateFormat, square: bool) -> tuple[Tensor, Tensor]:
    """(codes uint8, scales fp32 [R]) of a flat fp32 state; two 4-bit codes share a byte, the first in its lower half."""
    x_RB = pad(x_N, (0, -x_N.numel() % form.block)).view(-1, form.block)
    scales_R = x_RB.abs().amax(1)
    # Below that scale one over it would be infinite; such a block, or one of zeros, is coded as zeros.
    inverse_R = torch.where(scales_R > SMALLEST_SCALE, torch.reciprocal(scales_R), 0.0)
    unit_RB = x_RB * inverse_R[:, None]
    method = form.encode_square if square else form.encode_mean
    assert method is not None
    codes_N = method(unit_RB).flatten()[: x_N.numel() + x_N.numel() % 2 if form.bits == 4 else x_N.numel()]
    if form.bits == 4:
        codes_N = codes_N[0::2] | (codes_N[1::2] << 4)
    return codes_N.to(torch.uint8), scales_R


def decode(codes: Tensor, scales_R: Tensor, elements: int, form: StateFormat, square: bool) -> Tensor:
    """The flat fp32 state of `elements` values that codes and scales stand for."""
    codes_N = codes.to(torch.int32)
    if form.bits == 4:
        codes_N = torch.stack([codes_N & 15, codes_N >> 4], 1).flatten()
    codes_RB = pad(codes_N[:elements], (0, -elements % form.block)).view(-1, form.block)
    method = form.decode_square if square else form.decode_mean
    assert method is not None
    return method(codes_RB).mul_(scales_R[:, None]).flatten()[:elements]
