"""Where a run that is out of memory, or of disk, cannot just go on: it ends with what is whole, and says what helps."""

from __future__ import annotations

import errno
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import finetune
from finetune.__main__ import main
from finetune.checkpoint import store
from finetune.errors import CheckpointError, LostProcessError, NothingFitsError
from finetune.memory.step_in_backward import StepInBackward
from finetune.planner.shrink import difference
from finetune.tasks.text import TextTask
from finetune.train import step
from tests.conftest import changed
from tests.runs.faults import Faults, faulty, full, kinds, lora, newest
from tests.runs.history import column, last_state, same_bits
from tests.runs.ranks import endings, run_ranks


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
    change = re.search(r"resume=auto goes on with (.*) \(several", str(told))
    assert change is not None
    assert newest(tmp_path / "run") == "step-0000002"
    for summary in run_ranks(changed(recipe, resume="auto"), 2):
        assert summary["steps"] == 9
        (met,) = summary["out_of_memory"]
        assert met["step"] == 3
        assert difference(met["before"], met["after"]) == change[1]
    in_force = yaml.safe_load((tmp_path / "run/plan.yaml").read_text())
    assert {key: in_force[key] for key in met["after"]} == met["after"]
