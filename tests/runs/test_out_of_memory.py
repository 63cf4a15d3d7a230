"""Out of memory in a step: the run goes on with a smaller plan, and its bits are those of a run that was planned so.

Faults are put into functions of ours, in the middle of a step: gradients, or a half-made streamed step, are there.
"""

from __future__ import annotations

import errno
import itertools
import re
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import finetune
from finetune.__main__ import main
from finetune.checkpoint import store
from finetune.errors import CheckpointError, LostProcessError, NothingFitsError, StoppedError
from finetune.memory.step_in_backward import StepInBackward
from finetune.models.fast.backbone import FastLayers
from finetune.models.layerwise import Layers
from finetune.optim.slices import Slicing
from finetune.planner.shrink import difference
from finetune.tasks.text import TextTask
from finetune.train import loop, probe, step
from tests.conftest import changed, method
from tests.runs.history import column, last_state, same_bits
from tests.runs.ranks import endings, run_ranks
from tests.runs.test_resume import stop_at

PINS = ("micro_batch", "activation_checkpointing", "loss_chunk", "activation_offload", "optimizer_in_backward",
        "optimizer_placement", "embedding_placement", "weights")  # fmt: skip
OF_STREAMS = ("head_placement", "resident_blocks", "slots")


class Faults:
    """Raises `error` once in each of `at` (numbers of steps), after `count` calls of the replaced function in that step."""

    def __init__(
        self, patch: pytest.MonkeyPatch, at: list[int], error: Callable[[], BaseException], count: int
    ) -> None:
        self.at, self.error, self.count = list(at), error, count
        self.step, self.calls, self.fired = 0, 0, 0
        self.gradients: list[weakref.ref] = []
        train_step = loop.train_step

        def noted(job: Any, *rest: Any) -> Any:
            self.step, self.calls = job.progress.step + 1, 0
            assert all(reference() is None for reference in self.gradients)
            assert all(p.grad is None for p in job.model.trainable().values())
            self.job = weakref.ref(job)
            return train_step(job, *rest)

        patch.setattr(loop, "train_step", noted)

    def after(self, owner: Any, name: str, patch: pytest.MonkeyPatch) -> Faults:
        """Faults come after the function's work is done."""
        function = getattr(owner, name)

        def faulty(*given: Any, **named: Any) -> Any:
            result = function(*given, **named)
            self.calls += 1
            if self.step in self.at and self.calls == self.count:
                self.at.remove(self.step)
                job = self.job()
                self.fired += 1
                self.gradients = [weakref.ref(p.grad) for p in job.model.trainable().values() if p.grad is not None]
                raise self.error()
            return result

        patch.setattr(owner, name, faulty)
        return self


def full() -> BaseException:
    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def kinds(tiny: dict[str, Any], kind: str) -> tuple[dict[str, Any], Any, str, int]:
    """A recipe, and the function (after how many calls) in which memory runs out."""
    tiny = changed(tiny, data__valid_path=None, train__batch=8, train__max_steps=9)
    lora = changed(method(tiny, "lora"), adapter__dropout=0.5)
    whole = method(tiny, "none")
    streamed = changed(whole, plan__weights="streamed")
    ends = {"weights": "streamed", "fast_block": True, "embedding_placement": "host", "head_placement": "host"}
    return {
        "lora": (lora, step, "backward", 1),
        "full": (whole, step, "backward", 1),
        "packed": (changed(lora, data__pack=True, data__max_tokens=256), step, "backward", 1),
        "rebuilt": (changed(lora, plan__micro_batch=4), step, "backward", 2),
        "eight bits": (changed(whole, plan__micro_batch=4, optimizer__name="adamw8bit"), step, "backward", 2),
        "streamed": (streamed, Layers, "backward", 1),
        "streamed forward": (streamed, Layers, "forward", 1),
        "streamed update": (streamed, Slicing, "update", 2),
        "streamed lora": (changed(lora, plan__weights="streamed"), Layers, "backward", 2),
        "streamed visit": (changed(streamed, plan__head_placement="visit"), Layers, "backward", 1),
        "streamed visit forward": (changed(streamed, plan__head_placement="visit"), Layers, "forward", 1),
        "streamed ends": (changed(whole, plan=ends), FastLayers, "backward", 2),
        "streamed ends update": (changed(whole, plan=ends), Slicing, "update", 1),
        "streamed ends forward": (changed(whole, plan=ends), FastLayers, "forward", 1),
    }[kind]


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


def lora(tiny: dict[str, Any], **dotted: Any) -> dict[str, Any]:
    return changed(kinds(tiny, "lora")[0], **dotted)


def faulty(
    recipe: dict[str, Any], at: list[int], error: Callable[[], BaseException], *more: str, count: int = 1
) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        Faults(patch, at, error, count).after(step, "backward", patch)
        return finetune.run(recipe, *more)


def newest(folder: Path) -> str:
    path, notices = store.newest(folder / "checkpoints")
    assert path is not None
    assert not notices
    assert not [each.name for each in (folder / "checkpoints").iterdir() if each.name.startswith(".")]
    return path.name


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


def test_pins_are_kept_and_named(
    tiny: dict[str, Any], tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only pinned choices would help: the state is saved, the exit code is 3, and without the pin the run goes on."""
    pins = {"micro_batch": 4, "activation_checkpointing": True, "loss_chunk": 256, "embedding_placement": "device"}
    recipe = lora(tiny, plan=pins)
    Path("pinned.yaml").write_text(yaml.safe_dump(recipe))
    with pytest.MonkeyPatch.context() as patch:
        Faults(patch, [4], full, 2).after(step, "backward", patch)
        assert main(["recipe=pinned.yaml"]) == 3
    said = " ".join(capfd.readouterr().err.split())
    assert "out of memory in step 4" in said
    assert "plan.micro_batch=4" in said
    assert "the state after step 3 is saved" in said
    assert newest(tmp_path / "run") == "step-0000003"
    summary = finetune.run(recipe, "resume=auto", "plan.micro_batch=2").summary
    assert summary["steps"] == 9
    assert summary["out_of_memory"] == []


def test_a_trial_shrinks_in_place_or_ends(tiny: dict[str, Any], tmp_path: Path) -> None:
    """run.keep=false: nothing is saved, so only what needs no other assembly helps."""
    summary = faulty(lora(tiny, run__keep=False, plan__activation_checkpointing=True), [3], full).summary
    assert [each["step"] for each in summary["out_of_memory"]] == [3]
    assert summary["steps"] == 9
    pins = {"micro_batch": 4, "loss_chunk": 0}
    with pytest.raises(NothingFitsError, match=r"needs the model built again.*nothing of a trial is kept"):
        faulty(lora(tiny, run__keep=False, plan=pins, run__dir=str(tmp_path / "other")), [3], full, count=2)


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
    assert "longest rows" in met["within"]
    assert len(calls) == 2
    finetune.run(pinned(changed(recipe, run__dir=str(tmp_path / "planned")), met["after"]))
    assert same_bits(tmp_path / "run", tmp_path / "planned")


@pytest.mark.parametrize("every", [2, None])
def test_where_weights_had_moved_only_a_checkpoint_helps(
    tiny: dict[str, Any], tmp_path: Path, every: int | None
) -> None:
    """Updates in backward: the step is not repeated on half-updated weights."""
    recipe = changed(
        kinds(tiny, "full")[0], train__max_grad_norm=None, plan__optimizer_in_backward=True, checkpoint__every=every
    )

    def broken(run: dict[str, Any]) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            norms = StepInBackward._complete
            faults = Faults(patch, [6], full, 99)

            def complete(self: Any, parameter: Any) -> None:
                norms(self, parameter)
                faults.calls += 1
                if faults.step == 6 and faults.calls == 5 and 6 in faults.at:
                    faults.at.remove(6)
                    raise full()

            patch.setattr(StepInBackward, "_complete", complete)
            return finetune.run(run)

    if every is None:
        with pytest.raises(NothingFitsError, match="weights had moved in the failed step"):
            broken(recipe)
        assert store.newest(tmp_path / "run/checkpoints")[0] is None
        return
    summary = broken(recipe).summary
    assert [each["step"] for each in summary["out_of_memory"]] == [6]
    finetune.run(changed(recipe, run__dir=str(tmp_path / "straight")))
    assert column(tmp_path / "run", "step") == column(tmp_path / "straight", "step")
    one, two = last_state(tmp_path / "run")["trainable"], last_state(tmp_path / "straight")["trainable"]
    assert all(torch.allclose(one[key], two[key], rtol=0, atol=1e-5) for key in two)


HOST = {
    "python": MemoryError,
    "torch": lambda: RuntimeError("[enforce fail at alloc_cpu.cpp:121] . DefaultCPUAllocator: can't allocate memory"),
}


@pytest.mark.parametrize("kind", HOST)
def test_a_full_host_ends_with_the_last_complete_state(tiny: dict[str, Any], tmp_path: Path, kind: str) -> None:
    """The exit code is 3, what the step had not changed is saved, and a resume goes on to the same bits."""
    recipe = lora(tiny)
    with pytest.raises(
        NothingFitsError, match=r"the host ran out of memory in step 4.*the state after step 3 is saved"
    ) as caught:
        faulty(recipe, [4], HOST[kind])
    assert caught.value.exit_code == 3
    assert newest(tmp_path / "run") == "step-0000003"
    finetune.run(recipe, "resume=auto")
    finetune.run(changed(recipe, run__dir=str(tmp_path / "straight")))
    assert same_bits(tmp_path / "run", tmp_path / "straight")


def test_a_disk_that_fills_in_a_save_leaves_the_checkpoint_before(
    tiny: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = lora(tiny, checkpoint__every=2)
    with pytest.MonkeyPatch.context() as patch:
        write, calls = store.write_tensors, []

        def filling(path: Path, tensors: Any) -> Any:
            calls.append(path)
            size = write(path, tensors)
            if len(calls) == 5:  # the second file of the second checkpoint is there, and the disk is full
                raise OSError(errno.ENOSPC, "No space left on device", str(path))
            return size

        patch.setattr(store, "write_tensors", filling)
        with pytest.raises(CheckpointError, match=r"disk space.*step-0000002 is untouched"):
            finetune.run(recipe)
    assert newest(tmp_path / "run") == "step-0000002"
    finetune.run(recipe, "resume=auto")
    finetune.run(changed(recipe, run__dir=str(tmp_path / "straight")))
    assert same_bits(tmp_path / "run", tmp_path / "straight")


def test_an_evaluation_takes_fewer_rows_at_once(tiny: dict[str, Any], capfd: pytest.CaptureFixture[str]) -> None:
    """It changes no gradient, so the plan stays; the loss is that of all rows."""
    recipe = changed(tiny, train__max_steps=2)
    plain = finetune.run(recipe).summary
    sizes: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        loss_sum = TextTask.loss_sum

        def short(self: TextTask, model: Any, batch: Any, plan: Any) -> torch.Tensor:
            if not torch.is_grad_enabled():
                sizes.append(len(batch.lengths))
                if len(batch.lengths) > 2:
                    raise full()
            return loss_sum(self, model, batch, plan)

        patch.setattr(TextTask, "loss_sum", short)
        summary = finetune.run(changed(recipe, run__dir="other")).summary
    assert sizes == [4, 2, 2, 2, 1, 2, 2, 2, 1]
    assert summary["out_of_memory"] == []
    assert summary["eval_after"]["eval_loss"] == pytest.approx(plain["eval_after"]["eval_loss"], abs=1e-6)
    assert "it goes on with 2" in " ".join(capfd.readouterr().err.split())


@pytest.mark.parametrize("failing", [(0,), (1,), (0, 1)])
def test_several_processes_end_and_a_resume_takes_the_smaller_plan(
    tiny: dict[str, Any], tmp_path: Path, failing: tuple[int, ...]
) -> None:
    """Gloo: one process saves what all of them hold, and all end; nobody waits for the other's time-out."""
    recipe = lora(tiny)

    def short(rank: int) -> None:
        if rank in failing:
            Faults(pytest.MonkeyPatch(), [3], full, 1).after(step, "backward", pytest.MonkeyPatch())

    found = endings(recipe, 2, short)
    for rank, error in enumerate(found):
        assert isinstance(error, NothingFitsError if rank in failing else LostProcessError)
    told = found[failing[0]]
    assert told.exit_code == 3
    assert "the state after step 2 is saved" in str(told)
    change = re.search(r"resume=auto goes on with a smaller one \((.*)\)", str(told))
    assert change is not None
    assert newest(tmp_path / "run") == "step-0000002"
    for summary in run_ranks(changed(recipe, resume="auto"), 2):
        assert summary["steps"] == 9
        (met,) = summary["out_of_memory"]
        assert met["step"] == 3
        assert difference(met["before"], met["after"]) == change[1]
    in_force = yaml.safe_load((tmp_path / "run/plan.yaml").read_text())
    assert {key: in_force[key] for key in met["after"]} == met["after"]


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
