"""The lever "MLP in tiles" in plans: where it is taken, what it frees, and where a pin of it is refused."""

from __future__ import annotations

from typing import Any

import pytest

from finetune.errors import InputError
from finetune.memory.table import LEVERS
from finetune.models.shapes import SHAPES
from finetune.planner.hardware import parse
from finetune.planner.plan import decide
from finetune.planner.space import Space
from tests.unit.planner.test_decide import recipe

H200 = parse("1x141GB,512GB")
AGAIN = {"plan__micro_batch": 1, "plan__activation_checkpointing": True, "plan__loss_chunk": 1024}


def chosen(length: int = 2048, **changes: Any) -> Any:
    return decide(recipe(data__pack=False, **changes), SHAPES["llama3-8b"], H200, 1, length)


@pytest.mark.parametrize("weights", ["resident", "streamed"])
@pytest.mark.parametrize("length", [4096, 32768])
def test_the_estimate_falls_by_what_the_lever_says(length: int, weights: str) -> None:
    pins = {**AGAIN, "plan__weights": weights, "train__batch": 1}
    whole = chosen(length, plan__mlp_tile=0, **pins)
    tiled = chosen(length, plan__mlp_tile=1024, **pins)
    shape = SHAPES["llama3-8b"]
    space = Space(recipe(data__pack=False, **pins), shape, H200, 1, length)
    saved = LEVERS["MLP in tiles"].saves(space.case(tiled.plan))
    freed = whole.estimate.step_tensors - tiled.estimate.step_tensors
    # Below what a block frees only where another moment is the widest then.
    assert 0 < freed <= saved
    assert saved > (0.09 if length == 4096 else 0.7) * 2**30
    assert any("MLP in tiles of 1024: saves" in reason and "(pinned)" in reason for reason in tiled.reasons)


@pytest.mark.parametrize(
    ("changes", "words", "remedy"),
    [
        (
            {"plan__fast_block": False},
            "is for fast blocks, and they are off here",
            "plan.fast_block=true or plan.mlp_tile=0",
        ),
        (
            {"plan__activation_checkpointing": False},
            "plan.activation_checkpointing=false keeps what the MLP makes",
            "plan.activation_checkpointing=true or plan.mlp_tile=0",
        ),
        (
            {"plan__activation_checkpointing": 2},
            "plan.activation_checkpointing=2 keeps",
            "plan.activation_checkpointing=true",
        ),
        ({"plan__exact": "bitwise"}, "gives reordered sums, which plan.exact=bitwise forbids", "plan.mlp_tile=0"),
        ({"adapter__kind": "dora"}, "is for fast blocks", "plan.mlp_tile=0"),
    ],
)
def test_a_pin_that_cannot_be_kept_is_refused_by_name(changes: dict[str, Any], words: str, remedy: str) -> None:
    with pytest.raises(InputError) as caught:
        chosen(plan__mlp_tile=512, **changes)
    assert words in str(caught.value)
    assert remedy in str(caught.value)
    assert chosen(plan__mlp_tile=0, **changes).plan.mlp_tile == 0


def test_a_pin_brings_recomputation_with_it() -> None:
    plan = chosen(plan__mlp_tile=777).plan
    assert (plan.mlp_tile, plan.activation_checkpointing) == (777, True)


def test_tiles_are_tried_where_a_micro_batch_has_at_least_two() -> None:
    space = Space(recipe(data__pack=False, train__batch=16), SHAPES["llama3-8b"], H200, 1, 1024)
    tried = {(each.plan.micro_batch, each.plan.mlp_tile) for each in space.candidates() if each.plan.mlp_tile}
    assert (1, 1024) not in tried
    assert {(2, 1024), (16, 4096)} <= tried
    assert all(each.plan.activation_checkpointing is True for each in space.candidates() if each.plan.mlp_tile)
    exact = Space(recipe(data__pack=False, plan__exact="bitwise"), SHAPES["llama3-8b"], H200, 1, 2048)
    assert not any(each.plan.mlp_tile for each in exact.candidates())
