"""Keyed stochastic rounding and split weights: exact where they promise it, unbiased where they draw."""

from __future__ import annotations

import torch

from finetune.kernels.keyed_dropout import row_keys
from finetune.kernels.stochastic_rounding import TENSORS, Draws, draw_words, join, round_stochastically, split


def wide(count: int = 5000) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(count, generator=generator) * torch.exp2(torch.randint(-60, 60, (count,), generator=generator))
    return torch.cat([x, torch.tensor([0.0, -0.0, 1.0, -1.0, 3.4e38, -3.4e38, 1e-40, 1.00390625, -1.00390625])])


def test_split_and_join_give_back_every_bit() -> None:
    x = wide()
    weight, rest = split(x)
    assert (weight.dtype, rest.dtype) == (torch.bfloat16, torch.int16)
    assert torch.equal(join(weight, rest).view(torch.int32), x.view(torch.int32))


def test_the_split_weight_is_the_nearest_bf16() -> None:
    x = wide()
    weight, _ = split(x)
    nearest = x.to(torch.bfloat16)
    halfway = (x.view(torch.int32) & 0xFFFF) == 0x8000
    assert torch.equal(weight[~halfway], nearest[~halfway])
    # Halfway cases go away from zero: 1 + 1/256 lies between 1 and 1 + 1/128.
    assert split(torch.tensor([1.00390625, -1.00390625]))[0].tolist() == [1.0078125, -1.0078125]


def test_rounding_takes_one_of_the_two_neighbours_and_keeps_what_bf16_can_show() -> None:
    x = wide()
    rounded = round_stochastically(x, Draws(3, 1, 0))
    down = (x.view(torch.int32) & -65536).view(torch.float32)
    up = ((x.view(torch.int32) & -65536) + 65536).view(torch.float32)
    assert ((rounded.float() == down) | (rounded.float() == up)).all()
    shown = x.to(torch.bfloat16).float()
    assert torch.equal(round_stochastically(shown, Draws(3, 2, 0)).float(), shown)
    odd = torch.tensor([float("inf"), -float("inf"), float("nan")])
    kept = round_stochastically(odd, Draws(0, 1, 0))
    assert kept[:2].tolist() == odd[:2].tolist()
    assert kept[2].isnan()


def test_rounding_is_right_in_the_mean() -> None:
    x = torch.full((200_000,), 1.0 + 0.3 / 128)
    rounded = round_stochastically(x, Draws(0, 1, 0)).float()
    assert set(rounded.tolist()) == {1.0, 1.0078125}
    share = (rounded > 1).float().mean().item()
    assert abs(share - 0.3) < 0.005


def test_draws_depend_on_seed_step_tensor_and_element_alone() -> None:
    words = draw_words(Draws(5, 7, 2), 1000, "cpu")
    torch.manual_seed(1)
    assert torch.equal(words, draw_words(Draws(5, 7, 2), 1000, "cpu"))
    assert torch.equal(words[300:500], draw_words(Draws(5, 7, 2).after(300), 200, "cpu"))
    for other in (Draws(6, 7, 2), Draws(5, 8, 2), Draws(5, 7, 3), Draws(5, 7, 2, first=1)):
        assert (words == draw_words(other, 1000, "cpu")).sum() < 3
    assert torch.equal(words, row_keys(5, 7, TENSORS + 2, torch.arange(1000)))


def test_elements_past_2_to_the_32_have_draws_of_their_own() -> None:
    near, far = draw_words(Draws(0, 1, 0), 100, "cpu"), draw_words(Draws(0, 1, 0, first=2**32), 100, "cpu")
    assert (near == far).sum() == 0
    across = draw_words(Draws(0, 1, 0, first=2**32 - 50), 100, "cpu")
    assert torch.equal(across[50:], far[:50])
