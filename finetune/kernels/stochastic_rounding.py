"""How a 16-bit weight takes an fp32 update: to the nearest, stochastically with keyed draws, or with its rest kept.

A bf16 weight has eight bits of mantissa, so an update smaller than 1/512 of it is rounded away, every time. Stochastic
rounding moves it up with the probability that makes the mean right; `split` keeps the 16 bits that bf16 drops in a second
tensor, so that the two are together exactly the fp32 weight. The draws are a pure function of (seed, step, tensor, element):
the same on any rank, in any slicing and after a resume. One word of 32 bits a draw; its lower 16 decide.

Source of the bit trick (add noise below the kept bits, then cut): Revisiting BFloat16 Training, Zamirai et al. 2020,
arXiv 2010.06192. Legend: N elements of a flat slice.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from finetune.kernels.keyed_dropout import element_words, key_word

TENSORS = 2**40
"""Added to a tensor's index, so that a tensor and a dropout module of one number draw from different streams."""
UPPER = -65536
"""The int32 whose upper 16 bits are set: what bf16 keeps of an fp32's bits."""
HALF = 0x8000
EXPONENT = 0x7F800000


@dataclass(frozen=True)
class Draws:
    """Names the draws of one tensor's update: the recipe's seed, the optimizer step, the tensor's index in model order.

    `first` is the number of the slice's first element within its tensor, for updates that go slice by slice.
    """

    seed: int
    step: int
    tensor: int
    first: int = 0

    @property
    def word(self) -> int:
        """The 32-bit word that stands for seed, step and tensor."""
        return key_word(self.seed, self.step, TENSORS + self.tensor)

    def after(self, elements: int) -> Draws:
        """The draws of what begins `elements` later."""
        return Draws(self.seed, self.step, self.tensor, self.first + elements)


def draw_words(draws: Draws, elements: int, device: torch.device | str) -> Tensor:
    """int64 [N] of 32-bit words for elements `draws.first` and on."""
    places = torch.arange(draws.first, draws.first + elements, dtype=torch.int64, device=device)
    return element_words(draws.word, places)


def round_stochastically(x_N: Tensor, draws: Draws) -> Tensor:
    """bf16 [N] from a flat fp32 tensor: each of the two neighbours with a probability of its nearness (in steps of 1/65536).

    Values that bf16 can show stay as they are; infinities and NaN too.
    """
    bits_N = x_N.contiguous().view(torch.int32)
    noise_N = draw_words(draws, x_N.numel(), x_N.device).bitwise_and_(0xFFFF).to(torch.int32)
    # A finite value's magnitude never wraps: the largest, 0x7F7FFFFF, plus 0xFFFF is at most infinity and stays below NaN.
    rounded_N = torch.where((bits_N & EXPONENT) == EXPONENT, bits_N, bits_N + noise_N)
    return (rounded_N & UPPER).view(torch.float32).to(torch.bfloat16)


def split(x_N: Tensor) -> tuple[Tensor, Tensor]:
    """(bf16 weight, int16 correction) of a flat fp32 tensor; `join` gives back every bit of finite values.

    The weight is the nearest bf16; halfway cases go away from zero, so that the rest always fits 16 bits.
    """
    bits_N = x_N.contiguous().view(torch.int32)
    weight_N = (bits_N + HALF) & UPPER
    return weight_N.view(torch.float32).to(torch.bfloat16), (bits_N - weight_N).to(torch.int16)


def join(weight_N: Tensor, correction_N: Tensor) -> Tensor:
    """The flat fp32 tensor that `split` took apart."""
    return (weight_N.float().view(torch.int32) + correction_N.to(torch.int32)).view(torch.float32)
