"""The MLP in tiles against the untiled one: outputs and every gradient, whatever the linears and the rows are."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from finetune.kernels import gated_mlp, mlp_tiles
from finetune.kernels.adapted_linear import Adapter, Draws, Leaf
from finetune.kernels.gated_mlp import MlpLeaves
from finetune.kernels.keyed_dropout import apply_mask, row_keys

WIDTH, WIDE, RANK = 24, 40, 4
SHAPES = [(1, 37), (3, 12), (9, 5), (37, 1)]
"""One row longer than a tile, rows that tiles cut, many rows in a tile, rows of one token."""
TILES = [1, 7, 16, 36, 64]
KINDS = ["lora", "lora-dropout", "full", "full-bias"]


def leaves_of(kind: str, rows: int, dtype: torch.dtype = torch.float32) -> MlpLeaves:
    generator = torch.Generator().manual_seed(5)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator) * 0.2

    made = []
    for number, (outputs, inputs) in enumerate([(WIDE, WIDTH), (WIDE, WIDTH), (WIDTH, WIDE)]):
        weight, bias = drawn(outputs, inputs).to(dtype), drawn(outputs).to(dtype)
        if kind.startswith("full"):
            made.append(Leaf(weight=weight, bias=bias if kind == "full-bias" else None))
            continue
        draws = Draws(row_keys(3, 1, number, torch.arange(rows) + 5), 0.3) if kind == "lora-dropout" else None
        adapter = Adapter(drawn(RANK, inputs), drawn(outputs, RANK), 1.5, draws)
        made.append(Leaf(frozen=lambda weight=weight: weight, adapter=adapter))
    return MlpLeaves(*made)


def data_of(rows: int, length: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    shape = (rows, length, WIDTH)
    return torch.randn(shape, generator=generator).to(dtype), torch.randn(shape, generator=generator).to(dtype)


def needs_of(leaves: MlpLeaves) -> tuple[bool, ...]:
    return (True, *(tensor is not None for tensor in leaves.tensors()))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_outputs_and_gradients_are_those_of_the_untiled_mlp(shape: tuple[int, int], tile: int, kind: str) -> None:
    leaves = leaves_of(kind, shape[0])
    x, grad = data_of(*shape)
    out, _ = gated_mlp.second_half(gated_mlp.first_half(x, leaves), leaves)
    wanted = gated_mlp.back(grad, x, gated_mlp.first_half(x, leaves), leaves, needs_of(leaves))
    own = x.clone()
    assert mlp_tiles.forward_(own, leaves, tile) is own
    torch.testing.assert_close(own, out, atol=5e-6, rtol=1e-5)
    read = x.clone()
    slope, found = mlp_tiles.backward_(grad, read, leaves, needs_of(leaves), tile)
    assert slope is read
    torch.testing.assert_close(slope, wanted[0], atol=1e-5, rtol=1e-5)
    assert [each is None for each in found] == [each is None for each in wanted[1]]
    for ours, theirs in zip(found, wanted[1], strict=True):
        if theirs is not None:
            assert ours is not None
            torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_tile_of_all_tokens_gives_the_same_bits(kind: str) -> None:
    leaves, (x, grad) = leaves_of(kind, 3), data_of(3, 12)
    wanted = gated_mlp.back(grad, x, gated_mlp.first_half(x, leaves), leaves, needs_of(leaves))
    slope, found = mlp_tiles.backward_(grad, x.clone(), leaves, needs_of(leaves), 36)
    pairs: list[tuple[Any, Any]] = [(slope, wanted[0]), *zip(found, wanted[1], strict=True)]
    assert all(theirs is None or torch.equal(ours, theirs) for ours, theirs in pairs)


@pytest.mark.parametrize("trained", [torch.bfloat16, torch.float32])
def test_sixteen_bit_tiles_are_near_the_fp32_gradient(trained: torch.dtype) -> None:
    """A trained weight of 16 bits adds tiles in 16 bits, as micro-batches are; one of fp32 in fp32."""
    leaves, (x, grad) = leaves_of("full", 3, trained), data_of(3, 12, torch.bfloat16)
    exact = MlpLeaves(*(Leaf(weight=leaf.weight.float()) for leaf in leaves.all() if leaf.weight is not None))
    wide = x.float()
    truth = gated_mlp.back(grad.float(), wide, gated_mlp.first_half(wide, exact), exact, needs_of(exact))[1]
    whole = gated_mlp.back(grad, x, gated_mlp.first_half(x, leaves), leaves, needs_of(leaves))[1]
    tiled = mlp_tiles.backward_(grad, x.clone(), leaves, needs_of(leaves), 5)[1]
    for ours, theirs, right in zip(tiled, whole, truth, strict=True):
        if right is not None and ours is not None and theirs is not None:
            assert ours.dtype == trained
            errors = [float((each.float() - right).norm() / right.norm()) for each in (ours, theirs)]
            assert errors[0] < (2 * errors[1] if trained == torch.bfloat16 else 1.2 * errors[1])


def test_what_is_not_needed_is_not_made() -> None:
    leaves, (x, grad) = leaves_of("full-bias", 3), data_of(3, 12)
    slope, found = mlp_tiles.backward_(grad, x.clone(), leaves, (False,) * 13, 5)
    assert slope is None
    assert found == (None,) * 12


@pytest.mark.parametrize(("rows", "length"), SHAPES)
@pytest.mark.parametrize("start", [0, 3, 11])
def test_draws_of_a_tile_are_those_of_the_rows(rows: int, length: int, start: int) -> None:
    keys = row_keys(3, 1, 2, torch.arange(rows) + 5)
    x, _ = data_of(rows, length)
    whole = apply_mask(x, keys, 0.3).flatten(0, 1)[start : start + 13]
    tile = replace(Draws(keys, 0.3), start=start, length=length).apply(x.flatten(0, 1)[None, start : start + 13])
    assert torch.equal(tile[0], whole)
