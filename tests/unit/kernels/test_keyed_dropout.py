"""Keyed dropout: the mask depends on seed, step, module, row and element, and on nothing else."""

import math

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from finetune.errors import ModelError
from finetune.kernels.keyed_dropout import (
    SLICE_ELEMENTS,
    DrawKey,
    KeyedDropout,
    keep_mask,
    key_dropouts,
    mix,
    mix_,
    row_keys,
)


def mask_of(rows, length, features=16, *, seed=3, step=5, module=2, dropped=0.25):
    return keep_mask(row_keys(seed, step, module, torch.tensor(rows)), range(length), features, dropped)


def test_mixer_is_the_published_function():
    def reference(x):  # [16 4bdc9aa5 15 2729b469 16], written out in C's unsigned arithmetic
        x ^= x >> 16
        x = x * 0x4BDC9AA5 % 2**32
        x ^= x >> 15
        x = x * 0x2729B469 % 2**32
        return x ^ (x >> 16)

    words = [0, 1, 2, 0xFFFFFFFF, 0x80000000, 123456789, *range(2**32 - 50, 2**32)]
    assert [mix(word) for word in words] == [reference(word) for word in words]
    assert mix_(torch.tensor(words)).tolist() == [reference(word) for word in words]


def test_first_bits_of_a_fixed_key_stay_as_they_are():
    """Resumed runs of later versions must draw what earlier ones drew."""
    assert row_keys(0, 0, 0, torch.tensor([0, 1, 2**40])).tolist() == KEYS
    assert mask_of([7], 1, 24, dropped=0.5)[0, 0].int().tolist() == BITS


KEYS = [2158298711, 557027722, 3891906146]
BITS = [1, 1, 1, 1, 0, 1, 1, 1, 0, 0, 0, 0, 1, 0, 1, 1, 1, 1, 0, 1, 0, 1, 0, 0]


def test_mask_of_a_row_does_not_depend_on_the_micro_batch_its_padding_or_the_order():
    rows = [11, 4, 90, 2]
    whole = mask_of(rows, 12)
    for size in (1, 2):
        parts = [mask_of(rows[i : i + size], 12) for i in range(0, 4, size)]
        assert torch.equal(torch.cat(parts), whole)
    assert torch.equal(mask_of(rows, 37)[:, :12], whole)
    order = [2, 0, 3, 1]
    assert torch.equal(mask_of([rows[i] for i in order], 12), whole[order])


def test_slices_do_not_change_the_mask(monkeypatch):
    key = DrawKey(1, 2, torch.arange(3))
    layer = KeyedDropout(0.3, key, 0)
    x = torch.randn(3, 10, 8)
    once = layer(x)
    monkeypatch.setitem(SLICE_ELEMENTS, "cpu", 3 * 8 * 3)
    assert torch.equal(layer(x), once)


@pytest.mark.parametrize("change", [{"seed": 4}, {"step": 6}, {"module": 3}, {"seed": 3 + 2**32}, {"step": 5 + 2**32}])
def test_seed_step_and_module_draw_independently(change):
    one, other = mask_of([1, 2, 3, 4], 64, 64, dropped=0.5), mask_of([1, 2, 3, 4], 64, 64, dropped=0.5, **change)
    agreement = (one == other).float().mean().item()
    assert abs(agreement - 0.5) < 4 * 0.5 / math.sqrt(one.numel())


def test_rows_positions_and_features_draw_independently():
    mask = mask_of(list(range(40)), 40, 40, dropped=0.5)
    for dim in (0, 1, 2):
        for distance in (1, 2, 7):
            agreement = (mask == mask.roll(distance, dim)).float().mean().item()
            assert abs(agreement - 0.5) < 5 * 0.5 / math.sqrt(mask.numel())


@pytest.mark.parametrize("dropped", [0.05, 0.1, 0.5, 0.9])
def test_rate_and_patterns_of_eight_neighbours_are_those_of_fair_draws(dropped):
    """Chi-square of how many of 8 neighbours are kept against the binomial; 8 degrees of freedom, 1 in 10,000: 31.8."""
    mask = mask_of(list(range(64)), 64, 64, dropped=dropped)
    kept = mask.float().mean().item()
    assert abs(kept - (1 - dropped)) < 4 * math.sqrt(dropped * (1 - dropped) / mask.numel())
    for groups in (mask.reshape(-1, 8), mask.transpose(1, 2).reshape(-1, 8), mask.permute(1, 2, 0).reshape(-1, 8)):
        counts = torch.bincount(groups.sum(-1), minlength=9).double()
        expected = torch.tensor([math.comb(8, k) * (1 - dropped) ** k * dropped ** (8 - k) for k in range(9)]).double()
        expected *= groups.shape[0]
        usable = expected > 5
        assert ((counts - expected)[usable] ** 2 / expected[usable]).sum() < 31.8


def test_every_bit_of_the_hash_is_balanced():
    words = mix_(mix_(torch.arange(2**16)) ^ 12345)
    for bit in range(32):
        share = ((words >> bit) & 1).double().mean().item()
        assert abs(share - 0.5) < 5 * 0.5 / 2**8


def test_output_and_gradient_are_mask_over_kept_share():
    key = DrawKey(3, 5, torch.tensor([8, 9]))
    layer = KeyedDropout(0.25, key, 2)
    x = torch.randn(2, 6, 16, dtype=torch.float64, requires_grad=True)
    y = layer(x)
    upstream = torch.randn_like(y)
    y.backward(upstream)
    mask = mask_of([8, 9], 6)
    assert torch.equal(y, x * mask * (1 / 0.75))
    assert torch.equal(x.grad, upstream * mask * (1 / 0.75))


def test_a_dropped_infinity_is_zero():
    layer = KeyedDropout(0.5, DrawKey(0, 0, torch.tensor([0])), 0)
    y = layer(torch.full((1, 8, 8), math.inf))
    assert not y.isnan().any()
    assert (y == 0).any()


def test_backward_keeps_keys_and_no_mask():
    saved = []
    x = torch.randn(2, 32, 64, requires_grad=True)
    layer = KeyedDropout(0.25, DrawKey(0, 0, torch.tensor([0, 1])), 0)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t):
        layer(x)
    assert sum(saved) == 2


def test_eval_is_the_identity_and_the_dtype_stays():
    layer = KeyedDropout(0.5, DrawKey(0, 0, torch.tensor([0])), 0)
    x = torch.randn(1, 4, 4, dtype=torch.bfloat16)
    assert layer(x).dtype == torch.bfloat16
    assert layer.eval()(x) is x


def test_recomputation_draws_the_same():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.drop, self.second = nn.Linear(8, 8), nn.Dropout(0.4), nn.Linear(8, 8)

        def forward(self, x):
            return self.second(self.drop(self.first(x)))

    torch.manual_seed(0)
    block = Block()
    key = DrawKey(0, 1, torch.tensor([3, 1]))
    assert key_dropouts(block, key) == 1
    x = torch.randn(2, 5, 8)
    block(x).square().sum().backward()
    plain = [p.grad.clone() for p in block.parameters()]
    block.zero_grad()
    torch.manual_seed(99)
    checkpoint(block, x, use_reentrant=False, preserve_rng_state=False).square().sum().backward()
    assert all(torch.equal(a, p.grad) for a, p in zip(plain, block.parameters(), strict=True))


def test_swap_takes_every_dropout_by_name_order_and_leaves_zero_rates():
    model = nn.ModuleDict({"b": nn.Dropout(0.1), "a": nn.ModuleDict({"x": nn.Dropout(0.2), "y": nn.Dropout(0.0)})})
    shared = nn.Dropout(0.3)
    model["c"], model["d"] = shared, shared
    key = DrawKey(0)
    assert key_dropouts(model, key) == 3
    assert [(model["a"]["x"].index, model["a"]["x"].p), (model["b"].index, model["b"].p)] == [(0, 0.2), (1, 0.1)]
    assert model["c"] is model["d"]
    assert model["c"].index == 2
    assert type(model["a"]["y"]) is nn.Dropout
    other = DrawKey(1)
    assert key_dropouts(model, other) == 3
    assert model["b"].key is other
    assert model["b"].index == 1


def test_what_cannot_be_keyed_is_refused_by_name():
    with pytest.raises(ModelError, match="Dropout2d"):
        key_dropouts(nn.Sequential(nn.Dropout2d(0.1)), DrawKey(0))
    with pytest.raises(ModelError, match="keeps nothing"):
        key_dropouts(nn.Sequential(nn.Dropout(1.0)), DrawKey(0))
    layer = KeyedDropout(0.5, DrawKey(0, 0, torch.tensor([0])), 0, "block.drop")
    with pytest.raises(ModelError, match=r"block\.drop.*\[4, 8\]"):
        layer(torch.randn(4, 8))
    with pytest.raises(RuntimeError, match="2 rows"):
        layer(torch.randn(2, 4, 8))
