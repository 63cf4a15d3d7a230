"""The planner with all levers: what is picked when memory shrinks, what is refused with the reason, and counted bytes."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
import torch

from finetune.contracts import Plan
from finetune.errors import InputError
from finetune.memory import checkpointing
from finetune.memory.host_optimizer import HostStates
from finetune.memory.offload import Offload
from finetune.memory.step_in_backward import StepInBackward
from finetune.memory.table import LEVERS
from finetune.models.shapes import SHAPES, shape_of
from finetune.planner.estimate import Facts, estimate
from finetune.planner.hardware import parse
from finetune.planner.plan import decide
from tests.unit.planner.live_bytes import LiveBytes
from tests.unit.planner.test_decide import chosen, recipe, refused
from tests.unit.planner.test_estimate_counts import (
    LENGTH,
    ROWS,
    built,
    config_of,
    moving,
    recipe_of,
    run_step,
)

CPU = torch.device("cpu")


def on(plan: Plan) -> set[str]:
    return {lever.field for lever in LEVERS.values() if getattr(plan, lever.field) != lever.off}


def test_levers_come_in_as_memory_shrinks_and_the_host_is_asked_last() -> None:
    seen = [on(chosen("h200-141", plan__gpu_memory=f"{gib}GiB").plan) for gib in (120, 40, 20, 18, 17)]
    assert seen[0] <= {"loss_chunk", "embedding_placement"}
    assert "activation_checkpointing" in seen[2]
    assert len(seen[-1]) > len(seen[0])
    plans = [chosen("h200-141", plan__gpu_memory=f"{gib}GiB") for gib in (20, 18, 17)]
    assert all(plan.estimate.peak <= gib * 2**30 for plan, gib in zip(plans, (20, 18, 17), strict=True))


def test_full_8b_fits_80_gb_with_its_optimizer_on_the_host_and_less_without_clipping() -> None:
    full = {"adapter__kind": "none", "data__pack": False}
    clipped = chosen("1x80GB,256GB", **full)
    assert clipped.plan.optimizer_placement == "host"
    state = 8 * SHAPES["llama3-8b"].parameters
    assert clipped.estimate.host.causes["parked optimizer"] == pytest.approx(state, rel=1e-3)
    unclipped = chosen("1x60GB,256GB", train__max_grad_norm=None, train__batch=1, **full)
    assert unclipped.plan.optimizer_in_backward
    assert "not undone" in " ".join(unclipped.reasons)
    error = refused("1x60GB,256GB", train__batch=1, plan__weights="resident", **full)
    assert error.gap > 0
    assert chosen("1x60GB,256GB", train__batch=1, **full).plan.weights == "streamed"


def test_the_hosts_memory_bounds_what_is_put_there() -> None:
    full = {"adapter__kind": "none", "data__pack": False}
    error = refused("1x80GB,48GB", **full)
    assert "optimizer on the host" not in str(error) or "host memory" in str(error)
    assert chosen("1x80GB,256GB", **full).estimate.host.total <= 256e9


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"plan__optimizer_in_backward": True}, r"train\.max_grad_norm=1 clips it"),
        (
            {"plan__optimizer_in_backward": True, "train__max_grad_norm": None, "plan__micro_batch": 4},
            "makes several of 16 rows",
        ),
        ({"plan__embedding_placement": "host", "adapter__kind": "none"}, r"adapter\.kind=none trains it"),
        ({"plan__embedding_placement": "host", "adapter__targets": ["embed_tokens"]}, "adapter.targets reaches it"),
        ({"plan__activation_checkpointing": "selective", "model__attention": "eager"}, "does not use"),
    ],
)
def test_pins_that_cannot_be_exact_are_refused_with_the_reason(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        chosen("h200-141", **changes)


def test_a_tied_embedding_stays_on_the_device() -> None:
    with pytest.raises(InputError, match="shares its matrix with the head"):
        chosen("h200-141", "smollm2-135m", plan__embedding_placement="host")
    assert chosen("h200-141", "smollm2-135m").plan.embedding_placement == "device"


def test_on_a_cpu_nothing_moves_to_the_host_unless_pinned() -> None:
    plan = decide(recipe(), SHAPES["tiny"], parse("cpu"), 1, 128).plan
    assert not on(plan) & {lever.field for lever in LEVERS.values() if lever.to_host}
    pinned = decide(recipe(plan__activation_offload=True), SHAPES["tiny"], parse("cpu"), 1, 128)
    assert pinned.plan.activation_offload
    assert pinned.estimate.phases["step"].causes["parked activations"] > 0


@pytest.mark.parametrize("value", [2, 3, "selective"])
def test_modes_of_checkpointing_are_kept_when_pinned(value: Any) -> None:
    plain = {"plan__fast_block": False} if value == "selective" else {}
    assert chosen("h200-141", plan__activation_checkpointing=value, **plain).plan.activation_checkpointing == value


def test_the_search_of_the_largest_space_stays_quick() -> None:
    start = time.process_time()
    decide(
        recipe(train__batch=512, train__max_grad_norm=None, model__base="nf4"),
        SHAPES["llama3-70b"],
        parse("1x80GB"),
        1,
        2048,
    )
    assert time.process_time() - start < 2


VARIANTS: list[dict[str, Any]] = [
    {"activation_checkpointing": 2},
    {"activation_checkpointing": "selective"},
    {"optimizer_in_backward": True},
    {"optimizer_in_backward": True, "activation_checkpointing": True},
    {"optimizer_placement": "host"},
    {"activation_offload": True, "activation_checkpointing": True},
    {"activation_offload": True},
]


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize("kind", ["full", "lora"])
def test_the_widest_moment_under_each_lever_is_as_counted(kind: str, variant: dict[str, Any]) -> None:
    """Device bytes of a step on the CPU. Parked bytes are not counted (they are pages of the system); offload's estimate
    allows for two blocks on their way, which plain copies do not have."""
    plan = replace(Plan("cpu", ROWS, False, 128), **variant)
    config = config_of(4096)
    config.num_hidden_layers = 6
    model, base = built(kind, config, "fp32")
    lever = Offload(model, CPU) if plan.activation_offload else None
    checkpointing.apply(model, plan.activation_checkpointing, lever)
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(named.values())
    states = HostStates(optimizer, CPU) if plan.optimizer_placement == "host" else None
    backward = None
    if plan.optimizer_in_backward:
        from finetune.memory.host_optimizer import step_only

        backward = StepInBackward(named, lambda parameters: step_only(optimizer, parameters))

    class Updates:
        def step(self) -> None:
            if backward is None:
                (states or optimizer).step()
            else:
                backward.finish()

        def zero_grad(self) -> None:
            optimizer.zero_grad()

    data = torch.randint(0, 4096, (ROWS, LENGTH))

    def step() -> None:
        if backward is not None:
            backward.mode = "update"
        run_step(model, base, Updates(), data, plan, "fp32")

    step()
    with LiveBytes() as live:
        step()
    facts = Facts(LENGTH, "fp32", lambda elements, role: 8 * elements + 4, ROWS)
    found = estimate(shape_of(config), recipe_of(kind), plan, facts)
    causes = found.phases["step"].causes
    parked = sum(count for cause, count in causes.items() if cause.startswith("parked"))
    planned = moving(found, "step") - parked
    if plan.activation_offload:
        assert 0.98 * live.peak <= planned <= 2.2 * live.peak
        assert lever is not None
        assert lever.pool.bytes == causes["parked activations"]
    else:
        assert planned == pytest.approx(live.peak, rel=0.05)
    if states is not None:
        assert states.bytes == pytest.approx(causes.get("parked optimizer", 0), rel=1e-3)
