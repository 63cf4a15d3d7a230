"""Codes of optimizer states: their bytes, their error, and that a small mean square never becomes zero."""

from __future__ import annotations

import pytest
import torch

from finetune.kernels.state_codes import FORMATS, decode, encode, fp8_code, fp8_value, root

CODED = [name for name, form in FORMATS.items() if form.block]


def means(count: int = 5000) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(count, generator=generator) * torch.exp(2 * torch.randn(count, generator=generator))


@pytest.mark.parametrize("name", CODED)
@pytest.mark.parametrize("count", [1, 63, 256, 4099])
def test_codes_take_the_stated_bytes(name: str, count: int) -> None:
    form = FORMATS[name]
    codes, scales = encode(means(count), form, square=False)
    assert codes.dtype == torch.uint8
    assert codes.numel() == form.code_bytes(count) == -(-count * form.bits // 8)
    assert codes.numel() + 4 * scales.numel() == form.state_bytes(count)
    assert decode(codes, scales, count, form, square=False).shape == (count,)


@pytest.mark.parametrize(("name", "mean", "square"), [("8bit", 0.02, 0.04), ("fp8", 0.04, 0.13), ("4bit", 0.3, 0.4)])
def test_relative_error_of_what_matters_in_a_step(name: str, mean: float, square: float) -> None:
    x = means(65536)
    form = FORMATS[name]
    back = decode(*encode(x, form, square=False), x.numel(), form, square=False)
    assert ((back - x).norm() / x.norm()).item() < mean
    v = x * x
    coded = decode(*encode(v, form, square=True), v.numel(), form, square=True)
    scale = v.view(-1, form.block).amax(1).repeat_interleave(form.block)
    large = v > 0.01 * scale
    assert ((coded.sqrt() - v.sqrt()).abs() / v.sqrt())[large].max().item() < square


@pytest.mark.parametrize("name", CODED)
def test_a_small_mean_square_is_never_zero_and_means_keep_their_sign(name: str) -> None:
    form = FORMATS[name]
    v = torch.full((form.block,), 1e-14)
    v[0] = 1.0
    back = decode(*encode(v, form, square=True), v.numel(), form, square=True)
    assert (back > 0).all()
    m = means()
    signs = decode(*encode(m, form, square=False), m.numel(), form, square=False).sign() * m.sign()
    assert (signs >= 0).all()


@pytest.mark.parametrize("name", CODED)
@pytest.mark.parametrize("square", [False, True])
def test_decoded_values_code_to_themselves(name: str, square: bool) -> None:
    x = means() ** 2 if square else means()
    form = FORMATS[name]
    once = decode(*encode(x, form, square), x.numel(), form, square)
    twice = decode(*encode(once, form, square), x.numel(), form, square)
    assert torch.allclose(once, twice, rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", CODED)
@pytest.mark.parametrize("square", [False, True])
def test_zeros_stay_zeros_and_fresh_states_are_zeros(name: str, square: bool) -> None:
    form, zeros = FORMATS[name], torch.zeros(300)
    assert decode(*encode(zeros, form, square), 300, form, square).abs().max() == 0
    fresh = torch.zeros(form.code_bytes(300), dtype=torch.uint8)
    assert decode(fresh, torch.zeros(form.scale_count(300)), 300, form, square).abs().max() == 0


def test_fp8_codes_are_torchs_float8_e4m3() -> None:
    values = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    assert torch.equal(fp8_value(torch.arange(127, dtype=torch.int32)), values)
    x = torch.cat([means(20000).abs().clamp(max=448.0), torch.logspace(-12, 2.6, 5000), values])
    assert torch.equal(fp8_code(x).to(torch.uint8), x.to(torch.float8_e4m3fn).view(torch.uint8))


def test_roots_are_rounded_to_the_letter() -> None:
    import numpy as np

    x = means(20000).abs()
    assert root(x).numpy().tobytes() == np.sqrt(x.numpy()).tobytes()
