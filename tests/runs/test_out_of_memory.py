"""Out of memory in a step: the run goes on with a smaller plan, and its bits are those of a run that was planned so.

Faults are put into functions of ours, in the middle of a step: gradients, or a half-made streamed step, are there.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import finetune
from finetune.checkpoint import store
from finetune.errors import StoppedError
from finetune.train import probe, step
from tests.conftest import changed
from tests.runs.faults import Faults, faulty, full, kinds, lora
from tests.runs.history import column, last_state, same_bits
from tests.runs.test_resume import stop_at

PINS = ("micro_batch", "activation_checkpointing", "loss_chunk", "activation_offload", "optimizer_in_backward",
        "optimizer_placement", "embedding_placement", "weights")  # fmt: skip
OF_STREAMS = ("head_placement", "resident_blocks", "slots")


def pinned(recipe: dict[str, Any], plan: dict[str, Any]) -> dict[str, Any]:
    fields = PINS + (OF_STREAMS if plan["weights"] == "streamed" else ())
    return changed(recipe, **{f"plan__{field}": plan[field] for field in fields})


def in_place(before: dict[str, Any], after: dict[str, Any]) -> bool:
    return all(before[key] == after[key] for key in before if key not in ("micro_batch", "loss_chunk"))


def planned_so(recipe: dict[str, Any], plans: list[dict[str, Any]], steps: list[int]) -> None:
    """A run under the first plan, and from each of `steps` on under the next one."""
    for plan, until in zip(plans, [*steps, None], strict=True):
        with pytest.MonkeyPatch.context() as patch:
            if until is None:
                finetune.run(pinned(recipe, plan), "resume=auto")
                return
            stop_at(patch, until - 1)
            with pytest.raises(StoppedError):
                finetune.run(pinned(recipe, plan), "resume=auto")


@pytest.mark.parametrize(
    "kind", ["lora", "full", "packed", "rebuilt", "eight bits", "streamed", "streamed forward", "streamed update",
             "streamed lora", "streamed visit", "streamed visit forward", "streamed ends", "streamed ends forward",
             "streamed ends update"],
)  # fmt: skip
def test_it_goes_on_with_the_bits_of_the_smaller_plan(
    tiny: dict[str, Any], tmp_path: Path, capfd: pytest.CaptureFixture[str], kind: str
) -> None:
    """Memory runs out in steps 3 and 7: weights and state are those of a run that was planned so from these steps on, bit for
    bit, and within 1e-5 those of a run without a fault. Nothing of the failed attempt stays."""
    recipe, owner, name, count = kinds(tiny, kind)
    folder, at = tmp_path / "faulty", [3] if "ends" in kind else [3, 7]
    with pytest.MonkeyPatch.context() as patch:
        faults = Faults(patch, at, full, count).after(owner, name, patch)
        summary = finetune.run(changed(recipe, run__dir=str(folder))).summary
    met = summary["out_of_memory"]
    told = " ".join(capfd.readouterr().err.split())
    assert [each["step"] for each in met] == at
    assert all(f"out of memory in step {number} with rows" in told for number in at)
    plans = [met[0]["before"], *(each["after"] for each in met)]
    assert [each["before"] for each in met] == plans[:-1]
    assert bool(faults.gradients) == (name == "backward")
    assert ("the model is built again" in told) == any(not in_place(one, two) for one, two in itertools.pairwise(plans))
    assert "the model is built again" in told or kind not in ("rebuilt", "eight bits")
    assert all(one != two for one, two in itertools.pairwise(plans))
    in_force = yaml.safe_load((folder / "plan.yaml").read_text())
    assert {key: in_force[key] for key in plans[-1]} == plans[-1]

    planned = tmp_path / "planned"
    planned_so(changed(recipe, run__dir=str(planned)), plans, at)
    assert same_bits(folder, planned)
    for figure in ("step", "loss", "grad_norm", "lr"):
        assert column(folder, figure) == column(planned, figure)

    straight = tmp_path / "straight"
    finetune.run(changed(recipe, run__dir=str(straight)))
    one, two = last_state(folder)["trainable"], last_state(straight)["trainable"]
    assert all(torch.allclose(one[key], two[key], rtol=0, atol=1e-5) for key in two)


def test_a_resume_goes_on_with_the_smaller_plan(tiny: dict[str, Any], tmp_path: Path) -> None:
    recipe = lora(tiny)
    straight = faulty(changed(recipe, run__dir=str(tmp_path / "straight")), [3], full).summary
    with pytest.MonkeyPatch.context() as patch:
        stop_at(patch, 5)
        with pytest.raises(StoppedError):
            faulty(changed(recipe, run__dir=str(tmp_path / "stopped")), [3], full)
    resumed = finetune.run(changed(recipe, run__dir=str(tmp_path / "stopped")), "resume=auto").summary
    assert resumed["out_of_memory"] == straight["out_of_memory"] != []
    assert same_bits(tmp_path / "straight", tmp_path / "stopped")
    assert (tmp_path / "straight/plan.yaml").read_text().split("reasons")[0] == (
        tmp_path / "stopped/plan.yaml"
    ).read_text().split("reasons")[0]


@pytest.mark.parametrize("pins", [{}, {"micro_batch": 4}])
def test_the_trial_of_the_longest_rows_shrinks_the_plan(tiny: dict[str, Any], tmp_path: Path, pins: dict) -> None:
    """Before the first step: the run is that of the smaller plan from its start."""
    recipe = lora(tiny, plan={"probe": True, **pins})
    with pytest.MonkeyPatch.context() as patch:
        backward, calls = probe.backward, []

        def short(*given: Any) -> Any:
            calls.append(backward(*given))
            if len(calls) == 1:
                raise full()

        patch.setattr(probe, "backward", short)
        summary = finetune.run(recipe).summary
    (met,) = summary["out_of_memory"]
    assert met["step"] == 1
    assert "longest rows" in met["where"]
    assert len(calls) == 2
    finetune.run(pinned(changed(recipe, run__dir=str(tmp_path / "planned")), met["after"]))
    assert same_bits(tmp_path / "run", tmp_path / "planned")


def test_memory_may_run_out_again_in_the_same_step(tiny: dict[str, Any]) -> None:
    met = faulty(lora(tiny), [3, 3, 3], full).summary["out_of_memory"]
    assert [each["step"] for each in met] == [3, 3, 3]
    plans = [met[0]["before"], *(each["after"] for each in met)]
    assert all(plans.count(plan) == 1 for plan in plans)


@pytest.mark.parametrize("pins", [{"activation_checkpointing": True}, {"micro_batch": 4}])
def test_a_stream_of_rows_goes_on_where_it_was(tiny: dict[str, Any], tmp_path: Path, pins: dict[str, Any]) -> None:
    """No row is read twice or left out, in place and from a checkpoint."""
    recipe = lora(tiny, data__streaming=True, plan=pins)
    one, two = tmp_path / "faulty", tmp_path / "straight"
    assert faulty(changed(recipe, run__dir=str(one)), [3], full).summary["out_of_memory"]
    finetune.run(changed(recipe, run__dir=str(two)))
    for figure in ("step", "tokens", "trained_tokens"):
        assert column(one, figure) == column(two, figure)
    assert column(one, "loss") == pytest.approx(column(two, "loss"), abs=1e-5)


def test_the_loss_scale_counts_a_repeated_step_once(tiny: dict[str, Any], tmp_path: Path) -> None:
    recipe = lora(tiny, model__precision="fp16")
    with pytest.MonkeyPatch.context() as patch:
        Faults(patch, [3], full, 1).after(step, "clip", patch)
        assert finetune.run(recipe).summary["out_of_memory"]
    path, _ = store.newest(tmp_path / "run/checkpoints")
    assert path is not None
    assert store.read(path)[1]["loss_scale"]["clean"] == 9
