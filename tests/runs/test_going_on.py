"""Runs that were stopped at an awkward moment, moved back, cut short or raised: what they leave is that of one whole run."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import finetune
from finetune.checkpoint import export, store
from finetune.checkpoint.lock import LOCK, held
from finetune.errors import CheckpointError, StoppedError
from finetune.generate.evaluate import Evaluator
from tests.conftest import changed
from tests.runs.history import column, lines, same_bits


def at_call(patch: pytest.MonkeyPatch, owner: Any, name: str, number: int, act: Callable[[], None]) -> None:
    """Runs `act` at the start of the call with that number of `owner.name`."""
    real, calls = getattr(owner, name), []

    def counted(*arguments: Any, **named: Any) -> Any:
        calls.append(1)
        if len(calls) == number:
            act()
        return real(*arguments, **named)

    patch.setattr(owner, name, counted)


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def kill() -> None:
    """What a kill -9 is to the files: nothing more is written."""
    raise RuntimeError("killed")


def summary_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "summary.json").read_text())


@pytest.mark.parametrize("evaluation", [2, 3])
def test_an_evaluation_that_a_signal_cut_off_is_made_up_for(
    tiny: dict[str, Any], tmp_path: Path, evaluation: int
) -> None:
    """Evaluations before step 1, after 4 and after 8 (the last): none is missing, and early stopping counts them all."""
    recipe = changed(tiny, evaluate__every=4, checkpoint={"every": 3, "keep_best": "eval_loss"})
    finetune.run(changed(recipe, run__dir=str(tmp_path / "straight")))
    with pytest.MonkeyPatch.context() as patch:
        at_call(patch, Evaluator, "_sums", evaluation, terminate)
        with pytest.raises(StoppedError, match=f"after step {4 * (evaluation - 1)}"):
            finetune.run(recipe)
    finetune.run(recipe, "resume=auto")
    assert same_bits(tmp_path / "straight", tmp_path / "run")
    for name in ("step", "loss", "eval_loss"):
        assert column(tmp_path / "run", name) == column(tmp_path / "straight", name)
    for name in ("eval_before", "eval_after", "best_step"):
        assert summary_of(tmp_path / "run")[name] == summary_of(tmp_path / "straight")[name]


def test_lowered_steps_end_with_an_evaluation_of_that_model(tiny: dict[str, Any], tmp_path: Path) -> None:
    """Stopped after step 5 of 8 and resumed with max_steps=4: the figures are those of step 5, not of an earlier one."""
    recipe = changed(tiny, evaluate__every=2)
    with pytest.MonkeyPatch.context() as patch:
        at_call(patch, finetune.train.loop, "train_step", 6, terminate)
        with pytest.raises(StoppedError, match="after step 5"):
            finetune.run(recipe)
    summary = finetune.run(changed(recipe, train__max_steps=3), "resume=auto").summary
    last = lines(tmp_path / "run")[-1]
    assert last["step"] == summary["steps"]
    assert summary["eval_after"] == {"eval_loss": last["eval_loss"]}


def test_a_raised_run_killed_before_its_result_does_not_show_the_old_one(tiny: dict[str, Any], tmp_path: Path) -> None:
    finetune.run(changed(tiny, train__max_steps=4))
    old = (tmp_path / "run/adapter/adapter_model.safetensors").read_bytes()
    with pytest.MonkeyPatch.context() as patch:
        at_call(patch, finetune.train.start, "export_result", 1, kill)
        with pytest.raises(RuntimeError, match="killed"):
            finetune.run(tiny, "resume=auto")
    assert not (tmp_path / "run/summary.json").exists()
    assert finetune.run(tiny, "resume=auto").summary["steps"] == 8
    assert (tmp_path / "run/adapter/adapter_model.safetensors").read_bytes() != old


def test_a_deleted_result_is_made_again(tiny: dict[str, Any], tmp_path: Path) -> None:
    finetune.run(tiny)
    shutil.rmtree(tmp_path / "run/adapter")
    result = finetune.run(tiny, "resume=auto").result
    assert (result / "adapter_model.safetensors").exists()


def test_a_moved_finished_run_names_its_result_where_it_is(tiny: dict[str, Any], tmp_path: Path) -> None:
    finetune.run(tiny)
    (tmp_path / "run").rename(tmp_path / "moved")
    result = finetune.run(changed(tiny, run__dir=str(tmp_path / "moved")), "resume=auto").result
    assert result == tmp_path / "moved/adapter"


def test_a_run_that_stopped_for_want_of_gain_stays_stopped(
    tiny: dict[str, Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Resumed, also after a kill before its result, it trains no further step."""
    recipe = changed(tiny, optimizer__lr=1.0, train__max_steps=40, train__stop_after=2, evaluate__every=2)
    with pytest.MonkeyPatch.context() as patch:
        at_call(patch, finetune.train.start, "export_result", 1, kill)
        with pytest.raises(RuntimeError, match="killed"):
            finetune.run(recipe)
    steps = column(tmp_path / "run", "step")[-1]
    assert steps < 40
    assert finetune.run(recipe, "resume=auto").summary["steps"] == steps
    finetune.run(recipe, "resume=auto")
    assert f"already complete at step {steps}" in capfd.readouterr().err
    assert column(tmp_path / "run", "step")[-1] == steps


def test_going_back_leaves_one_history(tiny: dict[str, Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """From step 4 of 8 on with another rate: what was saved after step 4 goes, so resume=auto finds the new history."""
    recipe = changed(tiny, checkpoint={"every": 2, "keep": 4})
    finetune.run(recipe)
    other = changed(recipe, optimizer__lr=1e-3)
    back = tmp_path / "run/checkpoints/step-0000004"
    with pytest.MonkeyPatch.context() as patch:
        at_call(patch, finetune.train.loop, "train_step", 3, kill)
        with pytest.raises(RuntimeError, match="killed"):
            finetune.run(other, f"resume={back}")
    assert "deletes what was trained after it (step-0000006, step-0000008)" in capfd.readouterr().err
    assert [path.name for path in store.complete(tmp_path / "run/checkpoints")][-1] == "step-0000006"
    assert finetune.run(other, "resume=auto").summary["steps"] == 8
    assert [line["step"] for line in lines(tmp_path / "run") if "loss" in line] == list(range(1, 9))
    assert column(tmp_path / "run", "lr")[4:] == pytest.approx([lr / 10 for lr in cosine(8)[4:]])


def cosine(steps: int) -> list[float]:
    import math

    return [1e-2 * 0.5 * (1 + math.cos(math.pi * step / steps)) for step in range(steps)]


def test_a_checkpoint_outside_a_run_needs_a_run_folder(tiny: dict[str, Any], tmp_path: Path) -> None:
    recipe = changed(tiny, checkpoint__every=4)
    finetune.run(recipe)
    shutil.copytree(tmp_path / "run/checkpoints/step-0000004", tmp_path / "copies/step-0000004")
    homeless = changed(recipe, resume=str(tmp_path / "copies/step-0000004"))
    del homeless["run"]
    with pytest.raises(CheckpointError, match=r"give run\.dir"):
        finetune.run(homeless)
    with pytest.raises(CheckpointError, match="already holds another run"):
        finetune.run(changed(homeless, run__dir=str(tmp_path / "run")))
    summary = finetune.run(changed(homeless, run__dir=str(tmp_path / "branch"))).summary
    assert summary["steps"] == 8
    assert column(tmp_path / "branch", "loss") == column(tmp_path / "run", "loss")[4:]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"train__seed": 7}, r"train\.seed: 0 in the checkpoint, 7 now"),
        ({"model__precision": "bf16"}, "computed in fp32, this run computes in bf16"),
    ],
)
def test_what_would_mix_two_runs_is_refused(tiny: dict[str, Any], change: dict[str, Any], message: str) -> None:
    """Case B84: another seed means another order of rows, and another precision other sums."""
    finetune.run(tiny)
    with pytest.raises(CheckpointError, match=message):
        finetune.run(changed(tiny, train__max_steps=12, **change), "resume=auto")


def test_another_plan_is_told(tiny: dict[str, Any], capfd: pytest.CaptureFixture[str]) -> None:
    finetune.run(tiny)
    finetune.run(changed(tiny, train__max_steps=10, plan__micro_batch=2, model__precision="fp32"), "resume=auto")
    told = capfd.readouterr().err
    assert "the plan differs from the checkpoint's, so bits may: micro_batch 4 then, 2 now" in told
    assert "model.precision was" not in told


def test_two_runs_do_not_share_a_folder(tiny: dict[str, Any], tmp_path: Path) -> None:
    finetune.run(tiny)
    before = (tmp_path / "run/metrics.jsonl").read_bytes()
    with held(tmp_path / "run"), pytest.raises(CheckpointError, match=f"another run .*process {os.getpid()}"):
        finetune.run(changed(tiny, train__max_steps=10), "resume=auto")
    assert (tmp_path / "run/metrics.jsonl").read_bytes() == before
    assert not (tmp_path / "run" / LOCK).exists()


def test_a_run_that_is_refused_leaves_no_folder(tiny: dict[str, Any], tmp_path: Path) -> None:
    from finetune.errors import NothingFitsError

    with pytest.raises(NothingFitsError):
        finetune.run(changed(tiny, plan__host_memory="10MiB"))
    assert not (tmp_path / "run").exists()


def test_sigterm_while_the_result_is_written(tiny: dict[str, Any], tmp_path: Path) -> None:
    """It ends at once as stopped, leaves nothing half-written, and the resumed run makes the result."""
    with pytest.MonkeyPatch.context() as patch:
        at_call(patch, export, "_save_tokenizer", 2, terminate)
        with pytest.raises(StoppedError, match="after the last step"):
            finetune.run(tiny)
    assert {path.name for path in (tmp_path / "run").iterdir()} == {
        "recipe.yaml",
        "plan.yaml",
        "metrics.jsonl",
        "checkpoints",
    }
    assert (finetune.run(tiny, "resume=auto").result / "adapter_model.safetensors").exists()


def test_a_full_disk_at_the_metrics_is_no_fault_of_ours(tiny: dict[str, Any], tmp_path: Path) -> None:
    """No traceback but the file and the remedy; the last checkpoint is there and the run goes on from it."""
    from finetune.telemetry.metrics import Metrics

    class Full:
        def write(self, data: bytes) -> int:
            raise OSError(28, "No space left on device")

        def close(self) -> None: ...

    def fill(self: Metrics, line: dict[str, Any], write: Any = Metrics.write) -> None:
        if line["step"] == 6:
            self.file = Full()
        write(self, line)

    recipe = changed(tiny, checkpoint__every=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Metrics, "write", fill)
        with pytest.raises(CheckpointError, match=r"metrics\.jsonl: .* No space left on device"):
            finetune.run(recipe)
    assert finetune.run(recipe, "resume=auto").summary["steps"] == 8
    assert [line["step"] for line in lines(tmp_path / "run") if "loss" in line] == list(range(1, 9))


def test_samples_before_are_never_made_after_steps(tiny: dict[str, Any]) -> None:
    finetune.run(tiny)
    summary = finetune.run(changed(tiny, train__max_steps=9, evaluate__samples=1), "resume=auto").summary
    assert summary["samples_before"] == []
    assert len(summary["samples_after"]) == 1
