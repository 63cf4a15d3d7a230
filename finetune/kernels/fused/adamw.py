"""AdamW with coded states in one pass over a tensor: decode, decay, update, encode, round the weight.

The plain form, and what the codes mean, are in kernels/adamw and kernels/state_codes; this gives the same bits: it is compiled
without fused multiply-adds, with divisions and roots rounded as IEEE 754 says, and 16-bit numbers are read and written
as bits. A program does BLOCK elements, [ROWS, WIDTH] with one scale a row; places are int64.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from finetune.kernels.adam_values import CORRECTION, Scalars, States
from finetune.kernels.keyed_dropout import FIRST, GOLDEN, SECOND
from finetune.kernels.state_codes import FORMATS, SMALLEST_SCALE
from finetune.kernels.stochastic_rounding import Draws

BLOCK = 1024
FP32, NEAREST, STOCHASTIC, SPLIT = 0, 1, 2, 3
"""How the weight is stored: the kernel's WEIGHT."""

_FIRST, _SECOND, _GOLDEN = tl.constexpr(FIRST), tl.constexpr(SECOND), tl.constexpr(GOLDEN)
_SMALLEST = tl.constexpr(SMALLEST_SCALE)
_WHOLE = tl.constexpr(12582912.0)
"""1.5 * 2**23: adding and taking it away rounds to a whole number, halfway to even."""


@triton.jit
def mix(word):
    """kernels/keyed_dropout.mix, of uint32."""
    word = word ^ (word >> 16)
    word = word * _FIRST
    word = word ^ (word >> 15)
    word = word * _SECOND
    return word ^ (word >> 16)


@triton.jit
def draw_words(places, word):
    """kernels/stochastic_rounding.draw_words, of int64 places under the key's word."""
    high = mix(((places >> 32) & 0xFFFFFFFF).to(tl.uint32))
    low = (places & 0xFFFFFFFF).to(tl.uint32)
    return mix(mix((low ^ high) + _GOLDEN) ^ word)


@triton.jit
def whole(x):
    return (x + _WHOLE) - _WHOLE


@triton.jit
def fp8_code(x):
    bits = x.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - 960
    small = (x + 16384.0).to(tl.int32, bitcast=True) & 0xFF
    return tl.where(x < 0.015625, small, normal)


@triton.jit
def fp8_value(codes):
    normal = ((codes << 20) + 1006632960).to(tl.float32, bitcast=True)
    return tl.where(codes < 8, codes.to(tl.float32) * 0.001953125, normal)


@triton.jit
def code_of(x, FORMAT: tl.constexpr, SQUARE: tl.constexpr):
    """The codes (int32) of values in [-1, 1]."""
    if FORMAT == 1:
        if SQUARE:
            codes = tl.maximum(whole(tl.sqrt_rn(tl.sqrt_rn(tl.sqrt_rn(x))) * 255.0), 1.0).to(tl.int32)
        else:
            bent = whole(tl.sqrt_rn(tl.sqrt_rn(tl.abs(x))) * 127.0)
            codes = tl.where(x < 0, -bent, bent).to(tl.int32) + 127
    elif FORMAT == 2:
        if SQUARE:
            codes = tl.maximum(whole(tl.sqrt_rn(x) * 16.0), 1.0).to(tl.int32) - 1
        else:
            bent = whole(tl.sqrt_rn(tl.abs(x)) * 7.0)
            codes = tl.where(x < 0, -bent, bent).to(tl.int32) + 8
    else:
        if SQUARE:
            codes = fp8_code(tl.maximum(tl.sqrt_rn(x) * 448.0, 0.001953125))
        else:
            codes = fp8_code(tl.abs(x) * 448.0) + tl.where(x < 0, 128, 0)
    return codes


@triton.jit
def value_of(codes, FORMAT: tl.constexpr, SQUARE: tl.constexpr):
    """What codes (int32) stand for, in [-1, 1]."""
    if FORMAT == 1:
        if SQUARE:
            bent = codes.to(tl.float32) * (1 / 255)
            bent = bent * bent
            bent = bent * bent
            value = bent * bent
        else:
            bent = (codes - 127).to(tl.float32) * (1 / 127)
            squared = bent * bent
            value = squared * squared
            value = tl.where(bent < 0, -value, value)
    elif FORMAT == 2:
        if SQUARE:
            bent = (codes + 1).to(tl.float32) * 0.0625
            value = bent * bent
        else:
            bent = (codes - 8).to(tl.float32) * (1 / 7)
            value = bent * tl.abs(bent)
    else:
        if SQUARE:
            bent = fp8_value(codes) * (1 / 448)
            value = bent * bent
        else:
            bent = fp8_value(codes & 127) * (1 / 448)
            value = tl.where(codes >= 128, -bent, bent)
    return value


@triton.jit
def load_state(
    codes, scales, start, count, FORMAT: tl.constexpr, SQUARE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr
):
    """The fp32 state [ROWS, WIDTH] from element `start` on."""
    row = tl.arange(0, ROWS)[:, None]
    places = start + row * WIDTH + tl.arange(0, WIDTH)[None, :]
    if FORMAT == 0:
        state = tl.load(codes + places, mask=places < count, other=0.0)
    else:
        blocks = start // WIDTH + row
        scale = tl.load(scales + blocks, mask=blocks * WIDTH < count, other=0.0)
        if FORMAT == 2:
            pairs = start // 2 + row * (WIDTH // 2) + tl.arange(0, WIDTH // 2)[None, :]
            both = tl.load(codes + pairs, mask=pairs * 2 < count, other=0).to(tl.int32)
            whole_codes = tl.reshape(tl.join(both & 15, both >> 4), (ROWS, WIDTH))
        else:
            whole_codes = tl.load(codes + places, mask=places < count, other=0).to(tl.int32)
        state = value_of(whole_codes, FORMAT, SQUARE) * scale
        state = tl.where(places < count, state, 0.0)
    return state


@triton.jit
def store_state(
    state, codes, scales, start, count,
    FORMAT: tl.constexpr, SQUARE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row = tl.arange(0, ROWS)[:, None]
    places = start + row * WIDTH + tl.arange(0, WIDTH)[None, :]
    if FORMAT == 0:
        tl.store(codes + places, state, mask=places < count)
    else:
        scale = tl.max(tl.abs(state), 1)[:, None]
        blocks = start // WIDTH + row
        tl.store(scales + blocks, scale, mask=blocks * WIDTH < count)
        held = tl.where(scale > _SMALLEST, scale, 1.0)
        inverse = tl.where(scale > _SMALLEST, tl.div_rn(tl.full((ROWS, 1), 1.0, tl.float32), held), 0.0)
        coded = code_of(state * inverse, FORMAT, SQUARE)
        if FORMAT == 2:
            low, high = tl.split(tl.reshape(coded, (ROWS, WIDTH // 2, 2)))
            pairs = start // 2 + row * (WIDTH // 2) + tl.arange(0, WIDTH // 2)[None, :]
            tl.store(codes + pairs, (low | (high << 4)).to(tl.uint8), mask=pairs * 2 < count)
        else:
            tl.store(codes + places, coded.to(tl.uint8), mask=places < count)


@triton.jit
def store_weight(weight, weight_bits, correction, places, count, first, word, WEIGHT: tl.constexpr):
    """Writes fp32 weights as WEIGHT says; 16-bit ones as int16 bits. `first` is the tensor's element that place 0 is."""
    inside = places < count
    bits = weight.to(tl.int32, bitcast=True)
    if WEIGHT == 0:
        tl.store(weight_bits + places, bits, mask=inside)
    else:
        if WEIGHT == 3:
            rounded = (bits + 0x8000) & -65536
            tl.store(correction + places, (bits - rounded).to(tl.int16), mask=inside)
        else:
            if WEIGHT == 2:
                noise = (draw_words(places + first, word) & 0xFFFF).to(tl.int32)
            else:
                noise = 0x7FFF + ((bits >> 16) & 1)
            rounded = tl.where((bits & 0x7F800000) == 0x7F800000, bits, bits + noise)
        tl.store(weight_bits + places, (rounded >> 16).to(tl.int16), mask=inside)


@triton.jit(do_not_specialize=["count", "first", "word"])
def adamw_kernel(
    weight_bits, correction, gradient, mean, mean_scales, square, square_scales, count, first, word,
    decay, take1, beta2, take2, spread, epsilon, size,
    FORMAT: tl.constexpr, WEIGHT: tl.constexpr, NARROW: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """One program: ROWS * WIDTH elements. `weight_bits` is int32 (fp32) or int16 (bf16); NARROW: the gradient is bf16 as int16."""
    start = tl.program_id(0).to(tl.int64) * (ROWS * WIDTH)
    places = start + tl.arange(0, ROWS)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    inside = places < count
    slope = tl.load(gradient + places, mask=inside, other=0)
    if NARROW:
        slope = (slope.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    bits = tl.load(weight_bits + places, mask=inside, other=0).to(tl.int32)
    if WEIGHT != 0:
        bits = bits << 16
    if WEIGHT == 3:
        bits += tl.load(correction + places, mask=inside, other=0).to(tl.int32)
    weight = bits.to(tl.float32, bitcast=True)
    m = load_state(mean, mean_scales, start, count, FORMAT, False, ROWS, WIDTH)
    v = load_state(square, square_scales, start, count, FORMAT, True, ROWS, WIDTH)
    m = m + (slope - m) * take1
    v = v * beta2 + (slope * slope) * take2
    bottom = tl.sqrt_rn(v) * spread + epsilon
    weight = weight * decay - tl.div_rn(m, bottom) * size
    store_state(m, mean, mean_scales, start, count, FORMAT, False, ROWS, WIDTH)
    store_state(v, square, square_scales, start, count, FORMAT, True, ROWS, WIDTH)
    store_weight(weight, weight_bits, correction, places, count, first, word.to(tl.uint32), WEIGHT)


def weight_kind(weight: Tensor, states: States, draws: Draws | None) -> int:
    """The kernel's WEIGHT of an update."""
    if weight.dtype == torch.float32:
        return FP32
    if CORRECTION in states.tensors:
        return SPLIT
    return NEAREST if draws is None else STOCHASTIC


def launch(weight_N: Tensor, gradient_N: Tensor, states: States, scalars: Scalars, draws: Draws | None) -> None:
    """One AdamW step of a flat weight, in place, by one launch. What may be given is that of kernels/adamw.update_."""
    tensors, width = states.tensors, FORMATS[states.form].block or 256
    count, kind = weight_N.numel(), weight_kind(weight_N, states, draws)
    narrow = gradient_N.dtype == torch.bfloat16
    adamw_kernel[(triton.cdiv(count, BLOCK),)](
        weight_N.view(torch.int32 if kind == FP32 else torch.int16), tensors.get(CORRECTION),
        gradient_N.view(torch.int16) if narrow else gradient_N,
        tensors["mean"], tensors.get("mean_scales"), tensors["square"], tensors.get("square_scales"),
        count, draws.first if draws else 0, draws.word if draws else 0, *scalars.numbers(),
        FORMAT=FORMATS[states.form].number, WEIGHT=kind, NARROW=narrow, ROWS=BLOCK // width, WIDTH=width,
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
