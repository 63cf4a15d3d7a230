"""Out of memory where a run is between two things: while updates are flushed, saved, evaluated, or the model is built."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import finetune
from finetune.checkpoint import store
from finetune.errors import NothingFitsError, StoppedError
from finetune.memory.step_in_backward import StepInBackward
from finetune.memory.streaming.deferred import Deferred
from finetune.memory.streaming.slots import Slots
from finetune.train import loop, start, step
from tests.conftest import changed, method
from tests.runs.history import column, last_state


def short(tiny: dict[str, Any], kind: str, **more: Any) -> dict[str, Any]:
    recipe = changed(method(tiny, kind), model__precision="fp32", train__max_steps=4, checkpoint__every=2)
    return changed(recipe, evaluate__every=2, **more)


class Once:
    """Makes `owner.name` run out of memory at its call number `at`, before or after it did its work."""

    def __init__(self, patch: pytest.MonkeyPatch, owner: Any, name: str, at: int, after: bool = False) -> None:
        self.calls = 0
        real = getattr(owner, name)

        def call(*given: Any, **named: Any) -> Any:
            self.calls += 1
            if self.calls == at and not after:
                raise torch.OutOfMemoryError("no room")
            made = real(*given, **named)
            if self.calls == at:
                raise torch.OutOfMemoryError("no room")
            return made

        patch.setattr(owner, name, call)


def like_straight(recipe: dict[str, Any], folder: Path) -> None:
    """The run in its folder tells the history of one that met nothing, and ends with its weights."""
    here = Path(recipe["run"]["dir"])
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        finetune.run(changed(recipe, run__dir=str(folder / "straight")))
    for name in ("step", "loss", "eval_loss"):
        assert column(here, name) == pytest.approx(column(folder / "straight", name), rel=1e-5), name
    for name, weight in last_state(folder / "straight")["trainable"].items():
        torch.testing.assert_close(last_state(here)["trainable"][name], weight, atol=1e-5, rtol=0, msg=name)


def test_b89_the_evaluation_before_step_1_stays_in_the_metrics(tiny: dict[str, Any], tmp_path: Path) -> None:
    recipe = short(tiny, "none", plan__weights="streamed")
    with pytest.MonkeyPatch.context() as patch:
        Once(patch, step, "stream_batches", 1)
        finetune.run(recipe)
    assert len(column(tmp_path / "run", "eval_loss")) == 3
    like_straight(recipe, tmp_path)


@pytest.mark.parametrize("times", [1, 2])
def test_b89_promised_updates_that_find_no_room_before_an_evaluation(
    tiny: dict[str, Any], tmp_path: Path, times: int
) -> None:
    """They stay promised, and are made under the smaller plan."""
    recipe = short(tiny, "none", plan__weights="streamed", checkpoint__every=1)
    with pytest.MonkeyPatch.context() as patch:
        real, seen = Deferred.apply, []

        def apply(self: Deferred, number: int) -> bool:
            # Blocks 0 and 1 in the flush after step 1, then in step 3's forward; from call 5 on in the next flush.
            if self._units[number].pending:
                seen.append(number)
                if 5 <= len(seen) < 5 + times:
                    raise torch.OutOfMemoryError("no room")
            return real(self, number)

        patch.setattr(Deferred, "apply", apply)
        run = finetune.run(recipe)
    assert len(run.summary["out_of_memory"]) == times
    like_straight(recipe, tmp_path)


def test_b89_weights_that_were_updated_in_backward_are_never_updated_twice(
    tiny: dict[str, Any], tmp_path: Path
) -> None:
    recipe = short(tiny, "none", train__max_grad_norm=None, plan__optimizer_in_backward=True)
    with pytest.MonkeyPatch.context() as patch:
        Once(patch, StepInBackward, "finish", 3, after=True)
        run = finetune.run(recipe)
    assert len(run.summary["out_of_memory"]) == 1
    like_straight(recipe, tmp_path)


def test_b89_a_checkpoint_that_was_cut_off_is_written_all_the_same(tiny: dict[str, Any], tmp_path: Path) -> None:
    recipe = short(tiny, "none", plan__weights="streamed", checkpoint__keep_best="eval_loss", checkpoint__keep=9)
    with pytest.MonkeyPatch.context() as patch:
        Once(patch, store, "write", 1)
        run = finetune.run(recipe)
    assert [met["where"] for met in run.summary["out_of_memory"]] == ["the checkpoint after step 2"]
    names = [path.name for path in store.complete(tmp_path / "run/checkpoints")]
    assert names == ["step-0000002", "step-0000004"]


def test_a_model_that_finds_no_room_ends_with_3_and_is_not_blamed(tiny: dict[str, Any], tmp_path: Path) -> None:
    """Its blocks are tried one at a time when it is built; what stops that is memory, not the model."""
    recipe = short(tiny, "none", plan__weights="streamed")
    with pytest.MonkeyPatch.context() as patch:
        Once(patch, Slots, "_take_memory", 10)
        with pytest.raises(NothingFitsError, match="ran out of memory in loading") as caught:
            finetune.run(recipe)
    assert caught.value.exit_code == 3


def test_a_signal_in_the_failed_step_is_not_forgotten(tiny: dict[str, Any], tmp_path: Path) -> None:
    recipe = short(tiny, "lora", plan__micro_batch=1, plan__loss_chunk=0)
    real, seen = loop.train_step, []

    def train_step(job: Any, *rest: Any) -> Any:
        seen.append(job.progress.step)
        if seen == [0, 1, 2]:
            os.kill(os.getpid(), signal.SIGTERM)
            raise torch.OutOfMemoryError("no room")
        return real(job, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "train_step", train_step)
        with pytest.raises(StoppedError, match="stopped by SIGTERM"):
            finetune.run(recipe)
    assert store.newest(tmp_path / "run/checkpoints")[0].name == "step-0000002"
    finetune.run(recipe, "resume=auto")
    like_straight(recipe, tmp_path)


def test_sample_answers_that_find_no_room_before_the_device_is_visited(tiny: dict[str, Any], tmp_path: Path) -> None:
    recipe = short(tiny, "none", plan__weights="streamed", evaluate__samples=1)
    with pytest.MonkeyPatch.context() as patch:
        Once(patch, start.finish, "samples", 1)
        run = finetune.run(recipe)
    assert "sample answers before" in run.summary["out_of_memory"][0]["where"]
