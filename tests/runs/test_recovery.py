"""Out of memory in a run: the step is repeated with a smaller plan, bit for bit what a run with that plan would do."""

from __future__ import annotations

import errno
import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import finetune
from finetune.checkpoint import store
from finetune.errors import CheckpointError, NothingFitsError, StoppedError
from finetune.tasks.text import TextTask
from finetune.train import loop, recovery, step
from finetune.train.streamed import Streamed
from tests.conftest import changed, method
from tests.runs.history import column, last_state, same_bits
from tests.runs.test_resume import stop_at

KINDS = ["packed", "in backward"]
"""The others are in test_out_of_memory."""
ENDS = {"embedding_placement": "host", "head_placement": "host", "fast_block": True}
OPEN = ("micro_batch", "loss_chunk", "activation_checkpointing")


def recipe_of(tiny: dict[str, Any], kind: str) -> dict[str, Any]:
    recipe = changed(method(tiny, "lora" if kind in ("lora", "packed", "streamed") else "none"), checkpoint__every=1)
    recipe = changed(recipe, model__precision="fp32", checkpoint__keep=20)
    if kind == "packed":
        recipe = changed(recipe, data__pack=True, data__max_tokens=128, adapter__dropout=0.5)
    if kind.startswith("streamed"):
        recipe = changed(recipe, plan={"weights": "streamed", **(ENDS if "ends" in kind else {})})
    if kind == "in backward":
        recipe = changed(recipe, train__max_grad_norm=None, plan__optimizer_in_backward=True)
    return recipe


class Faults:
    """Runs out of memory once at each of `steps` (1-based), in mid-step: when the first micro-batch's backward is over,
    in a streamed step between two blocks of backward."""

    def __init__(self, patch: pytest.MonkeyPatch, steps: tuple[int, ...]) -> None:
        self.left = list(steps)
        self.gradients: list[Any] = []
        self.step = 0
        backward, block, train = step.backward, Streamed._backward_block, loop.train_step

        def train_step(job: Any, *rest: Any) -> Any:
            self.step, self.job = job.progress.step + 1, job
            return train(job, *rest)

        def after(*given: Any, **named: Any) -> Any:
            result = backward(*given, **named)
            self.fail()
            return result

        def after_block(stream: Streamed, number: int, *rest: Any) -> None:
            block(stream, number, *rest)
            self.fail()

        patch.setattr(loop, "train_step", train_step)
        patch.setattr(step, "backward", after)
        patch.setattr(Streamed, "_backward_block", after_block)

    def fail(self) -> None:
        if self.left and self.left[0] == self.step:
            self.left.pop(0)
            self.gradients += [weakref.ref(p.grad) for p in self.job.model.trainable().values() if p.grad is not None]
            del self.job
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def recovered(recipe: dict[str, Any], folder: Path, *steps: int) -> tuple[Any, Faults]:
    with pytest.MonkeyPatch.context() as patch:
        faults = Faults(patch, steps)
        return finetune.run(changed(recipe, run__dir=str(folder))), faults


def pinned(plan: dict[str, Any]) -> list[str]:
    text = {True: "true", False: "false"}
    return [
        f"plan.{name}={text.get(plan[name], plan[name]) if isinstance(plan[name], bool) else plan[name]}"
        for name in (*OPEN, "weights")
    ]


def in_parts(recipe: dict[str, Any], folder: Path, parts: list[tuple[dict[str, Any], int | None]]) -> None:
    """A run that is stopped after the steps named, each part with a plan pinned."""
    recipe = changed(recipe, run__dir=str(folder))
    for at, (plan, last) in enumerate(parts):
        pins = [*pinned(plan), *(["resume=auto"] if at else [])]
        with pytest.MonkeyPatch.context() as patch:
            if last is None:
                finetune.run(recipe, *pins)
                continue
            stop_at(patch, last)
            with pytest.raises(StoppedError):
                finetune.run(recipe, *pins)


@pytest.mark.parametrize("kind", KINDS)
def test_b89_steps_3_and_7_are_repeated_with_smaller_plans(tiny: dict[str, Any], tmp_path: Path, kind: str) -> None:
    recipe = recipe_of(tiny, kind)
    run, faults = recovered(recipe, tmp_path / "run", 3, 7)
    assert not faults.left
    first, second = run.summary["out_of_memory"]
    assert (first["step"], second["step"]) == (3, 7)
    assert first["after"] == second["before"]
    assert first["before"] != first["after"] != second["after"]
    plan = yaml.safe_load((tmp_path / "run/plan.yaml").read_text())
    assert {name: plan[name] for name in second["after"]} == second["after"]
    in_parts(recipe, tmp_path / "parts", [(first["before"], 2), (first["after"], 6), (second["after"], None)])
    assert same_bits(tmp_path / "run", tmp_path / "parts")
    for name in ("step", "loss", "lr", "grad_norm", "eval_loss"):
        assert column(tmp_path / "run", name) == column(tmp_path / "parts", name)
    finetune.run(changed(recipe, run__dir=str(tmp_path / "straight")))
    straight, here = last_state(tmp_path / "straight"), last_state(tmp_path / "run")
    for name, weight in straight["trainable"].items():
        torch.testing.assert_close(here["trainable"][name], weight, atol=1e-5, rtol=0, msg=name)


def test_what_the_failed_step_held_is_freed(
    tiny: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No gradient of the failed step stands when the smaller plan is chosen."""
    seen: list[int] = []
    smaller = recovery.smaller

    def look(*given: Any, **named: Any) -> Any:
        gc.collect()
        seen.append(sum(ref() is not None for ref in faults.gradients))
        return smaller(*given, **named)

    monkeypatch.setattr(recovery, "smaller", look)
    faults = Faults(monkeypatch, (3,))
    finetune.run(recipe_of(tiny, "none"))
    assert len(faults.gradients) > 5
    assert seen == [0]


def test_weights_that_moved_are_taken_from_the_last_checkpoint(
    tiny: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Out of memory when half of the update is made: the run goes back to step 2's checkpoint and makes step 3 and 4 anew."""
    recipe = changed(recipe_of(tiny, "none"), checkpoint__every=2)
    finetune.run(changed(recipe, run__dir=str(tmp_path / "straight")))
    calls: list[int] = []
    from torch.optim import AdamW

    real = AdamW.step

    def half(self: Any, *given: Any) -> Any:
        result = real(self, *given)
        calls.append(1)
        if len(calls) == 4:
            raise torch.OutOfMemoryError("no room")
        return result

    monkeypatch.setattr(AdamW, "step", half)
    run = finetune.run(recipe)
    assert "from step-0000002 (weights had moved in the failed step)" in " ".join(capsys.readouterr().err.split())
    assert run.summary["out_of_memory"][0]["step"] == 4
    assert len(column(tmp_path / "run", "loss")) == 8
    straight, here = last_state(tmp_path / "straight"), last_state(tmp_path / "run")
    for name, weight in straight["trainable"].items():
        torch.testing.assert_close(here["trainable"][name], weight, atol=1e-5, rtol=0)


def test_an_evaluation_halves_its_batches(
    tiny: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = TextTask.loss_sum

    def loss_sum(self: TextTask, model: Any, batch: Any, plan: Any) -> torch.Tensor:
        if not torch.is_grad_enabled() and len(batch.lengths) > 1:
            raise torch.OutOfMemoryError("no room")
        return real(self, model, batch, plan)

    recipe = changed(recipe_of(tiny, "lora"), plan__micro_batch=4)
    straight = finetune.run(changed(recipe, run__dir=str(tmp_path / "straight")))
    monkeypatch.setattr(TextTask, "loss_sum", loss_sum)
    run = finetune.run(recipe)
    assert "out of memory in an evaluation with batches of 4 rows: it goes on with 2" in " ".join(
        capsys.readouterr().err.split()
    )
    assert run.summary["out_of_memory"] == []
    assert run.summary["eval_after"]["eval_loss"] == pytest.approx(
        straight.summary["eval_after"]["eval_loss"], rel=1e-6
    )
    assert same_bits(tmp_path / "run", tmp_path / "straight")


@pytest.mark.parametrize(
    "error",
    [MemoryError(), RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory")],
)
def test_a_host_without_memory_ends_the_run_with_3(
    tiny: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    real = step.backward

    def backward(job: Any, *rest: Any, **named: Any) -> Any:
        if job.progress.step == 3:
            raise error
        return real(job, *rest, **named)

    monkeypatch.setattr(step, "backward", backward)
    with pytest.raises(NothingFitsError, match="the host ran out of memory in step 4") as caught:
        finetune.run(recipe_of(tiny, "lora"))
    assert caught.value.exit_code == 3
    assert store.read(store.newest(tmp_path / "run/checkpoints")[0])[1]["progress"]["step"] == 3


def test_a_disk_that_fills_up_in_a_save_leaves_the_checkpoint_before(
    tiny: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The third checkpoint breaks off in its second file."""
    real, calls = store.write_tensors, []

    def write(path: Path, group: Any) -> Any:
        calls.append(path)
        if len(calls) == 8:
            path.write_bytes(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(path, group)

    monkeypatch.setattr(store, "write_tensors", write)
    with pytest.raises(CheckpointError) as caught:
        finetune.run(recipe_of(tiny, "lora"))
    assert caught.value.exit_code == 2
    assert "step-0000002 is untouched" in str(caught.value)
    assert [path.name for path in store.complete(tmp_path / "run/checkpoints")] == ["step-0000001", "step-0000002"]
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    assert finetune.run(recipe_of(tiny, "lora"), "resume=auto").summary["steps"] == 8
