"""Every lever alone and every pair of levers leaves losses, gradients and updated weights of three steps as they were."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from finetune.contracts import Plan
from finetune.memory.table import LEVERS
from finetune.train.step import train_step
from tests.numerics.tiny_jobs import adapted, base, job_of

PLAIN = Plan("cpu", 4, False, 0)
SETTINGS: list[tuple[str, Any]] = [
    ("activation_checkpointing", True),
    ("activation_checkpointing", 2),
    ("activation_checkpointing", "selective"),
    ("loss_chunk", 7),
    ("mlp_tile", 9),
    ("activation_offload", True),
    ("optimizer_in_backward", True),
    ("optimizer_placement", "host"),
    ("embedding_placement", "host"),
]
MODULES = {"full": base, "lora": adapted}
REORDERED = ("loss_chunk", "mlp_tile")
ALONE = [(one,) for one in SETTINGS]
PAIRS = [(one, other) for one, other in itertools.combinations(SETTINGS, 2) if one[0] != other[0]]


def allowed(kind: str, settings: tuple[tuple[str, Any], ...], fast: bool = False) -> bool:
    """An embedding that trains stays on the device (the plan refuses it, and so does the hook); fast blocks have no
    selective mode; an MLP goes in tiles where a fast block is recomputed."""
    if fast and ("activation_checkpointing", "selective") in settings:
        return False
    if ("mlp_tile", 9) in settings and not (fast and ("activation_checkpointing", True) in settings):
        return False
    return kind == "lora" or ("embedding_placement", "host") not in settings


CASES = [
    (kind, fast, settings)
    for fast in (False, True)
    for kind in MODULES
    for settings in ALONE + PAIRS
    if allowed(kind, settings, fast)
]


def three_steps(
    kind: str, plan: Plan, folder: Path
) -> tuple[list[float], list[dict[str, torch.Tensor]], dict[str, Any]]:
    """Losses, each step's gradients before the update, and the weights and optimizer state after the last."""
    torch.manual_seed(9)
    seen: dict[str, torch.Tensor] = {}
    module = MODULES[kind]()
    gradients: list[dict[str, torch.Tensor]] = []
    job = job_of(module, folder, replace(plan, optimizer_in_backward=False))
    # Registered before the lever's own hooks, so it sees each gradient before the update takes it.
    for name, parameter in job.model.trainable().items():
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: seen.__setitem__(name, p.grad.clone()))
    if plan.optimizer_in_backward:
        from finetune.train.assemble import Update

        job = replace(job, plan=plan, update=Update(job.model, job.optimizer, plan, job.world.device))
    losses = []
    for step in range(3):
        losses.append(train_step(job, range(4 * step, 4 * step + 4), 10).loss)
        job.progress.step += 1
        gradients.append(dict(seen))
    assert all(parameter.grad is None for parameter in job.model.trainable().values())
    after = {name: parameter.detach().clone() for name, parameter in job.model.trainable().items()}
    for name, parameter in job.model.trainable().items():
        after |= {f"{name}/{key}": value for key, value in job.optimizer.state[parameter].items()}
    return losses, gradients, after


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return {
        (kind, fast): three_steps(kind, replace(PLAIN, fast_block=fast), tmp_path_factory.mktemp(kind))
        for kind in MODULES
        for fast in (False, True)
    }


def name_of(kind: str, fast: bool, settings: tuple[tuple[str, Any], ...]) -> str:
    return "-".join([kind, *(["fast"] if fast else []), *(f"{field}={value}" for field, value in settings)])


@pytest.mark.parametrize(("kind", "fast", "settings"), CASES, ids=[name_of(*case) for case in CASES])
def test_levers_alone_and_in_pairs_change_nothing(
    plain: dict[str, Any], tmp_path: Path, kind: str, fast: bool, settings: tuple[tuple[str, Any], ...]
) -> None:
    wanted = plain[kind, fast]
    found = three_steps(kind, replace(PLAIN, fast_block=fast, **dict(settings)), tmp_path)
    exact = not any(field in REORDERED for field, _ in settings)
    tolerance = {"atol": 0.0, "rtol": 0.0} if exact else {"atol": 1e-5, "rtol": 1e-4}
    assert found[0] == wanted[0] if exact else found[0] == pytest.approx(wanted[0], rel=1e-6)
    for ours, theirs in [*zip(found[1], wanted[1], strict=True), (found[2], wanted[2])]:
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            torch.testing.assert_close(ours[name], value, **tolerance, msg=name)


def test_every_row_of_the_table_is_in_the_pairs() -> None:
    assert {field for field, _ in SETTINGS} == {lever.field for lever in LEVERS.values()}
    stated = {lever.field for lever in LEVERS.values() if lever.exact != "bitwise"}
    assert stated == set(REORDERED)
    assert len([case for case in CASES if not case[1]]) == 2 * (8 + 25) - 8
    assert len([case for case in CASES if case[1]]) == 2 * (7 + 20 + 1) - 7


@pytest.mark.parametrize("kind", MODULES)
def test_fast_blocks_train_as_transformers_own(plain: dict[str, Any], kind: str) -> None:
    """Other roundings: the losses and weights of three steps, in fp32."""
    wanted, found = plain[kind, False], plain[kind, True]
    assert found[0] == pytest.approx(wanted[0], rel=1e-6)
    for name, value in wanted[2].items():
        torch.testing.assert_close(found[2][name], value, atol=1e-5, rtol=1e-4, msg=name)
