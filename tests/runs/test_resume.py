"""A run that was stopped goes on to the same bits; one that cannot go on says why."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import finetune
from finetune.checkpoint import store
from finetune.errors import CheckpointError, DivergedError, StoppedError
from tests.conftest import alpaca_rows, changed, method, write_jsonl
from tests.runs.history import column, last_state, lines, same_bits


def stop_at(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """Sends this process a real SIGTERM as soon as `step` is recorded."""
    from finetune.telemetry.metrics import Metrics

    write = Metrics.write

    def write_and_signal(self: Metrics, line: dict[str, Any]) -> None:
        write(self, line)
        if line["step"] == step and "loss" in line:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Metrics, "write", write_and_signal)


def interrupted(recipe: dict[str, Any], folder: Path, step: int) -> None:
    """Runs until SIGTERM after `step`, then resumes to the end."""
    recipe = changed(recipe, run__dir=str(folder))
    with pytest.MonkeyPatch.context() as patch:
        stop_at(patch, step)
        with pytest.raises(StoppedError, match=f"after step {step}"):
            finetune.run(recipe)
    finetune.run(recipe, "resume=auto")


@pytest.mark.parametrize("optimizer", ["adamw", "adamw8bit"])
@pytest.mark.parametrize("kind", ["none", "lora"])
def test_interrupted_run_ends_with_the_same_bits(
    tiny: dict[str, Any], tmp_path: Path, kind: str, optimizer: str
) -> None:
    """Cases B69, B72, B82: SIGTERM in mid-epoch, with dropout and packing; weights and optimizer state equal bit for bit."""
    recipe = changed(
        method(tiny, kind), data__pack=True, data__max_tokens=256, train__batch=3, optimizer__name=optimizer
    )
    if kind == "lora":
        recipe = changed(recipe, adapter__dropout=0.5)
    straight = tmp_path / "straight"
    finetune.run(changed(recipe, run__dir=str(straight)))
    interrupted(recipe, tmp_path / "stopped", 3)
    assert same_bits(straight, tmp_path / "stopped")
    for name in ("step", "loss", "lr", "grad_norm", "eval_loss"):
        assert column(tmp_path / "stopped", name) == column(straight, name)


def test_b67_learning_rate_goes_on(tiny: dict[str, Any], tmp_path: Path) -> None:
    """Case B67: linear schedule, 10 steps, stopped after 5: steps 6-10 as without the stop; warm-up not repeated."""
    recipe = changed(tiny, schedule={"name": "linear", "warmup": 2}, train__max_steps=10)
    finetune.run(changed(recipe, run__dir=str(tmp_path / "straight")))
    interrupted(recipe, tmp_path / "stopped", 5)
    assert column(tmp_path / "stopped", "lr") == column(tmp_path / "straight", "lr")


def test_b69_b71_each_row_once_an_epoch(tiny: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cases B69, B71: 24 rows, 3 epochs, stopped in epoch 1: every epoch sees each row once, in the uninterrupted order."""
    from finetune.tasks.text import TextTask

    seen: list[int] = []
    collate = TextTask.collate

    def noting(self: TextTask, rows: Any) -> Any:
        if self_trains[0]:
            seen.extend(row.id for row in rows)
        return collate(self, rows)

    self_trains = [True]
    monkeypatch.setattr(TextTask, "collate", noting)
    recipe = changed(tiny, train__epochs=3, train__batch=5)
    del recipe["train"]["max_steps"], recipe["data"]["valid_path"]
    finetune.run(changed(recipe, run__dir=str(tmp_path / "straight")))
    straight = list(seen)
    seen.clear()
    interrupted(recipe, tmp_path / "stopped", 3)
    # the step that SIGTERM pre-empted had its rows collated before the flag was seen
    assert seen[:15] + seen[-(72 - 15) :] == straight
    for epoch in range(3):
        assert sorted(straight[24 * epoch : 24 * (epoch + 1)]) == list(range(24))


def test_b74_newest_incomplete_falls_back(
    tiny: dict[str, Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Case B74: the newer checkpoint lacks a file: the older is used with a warning; naming the broken one is an error."""
    recipe = changed(tiny, checkpoint={"every": 2, "keep": 4})
    finetune.run(recipe)
    straight = last_state(tmp_path / "run")
    newest, _ = store.newest(tmp_path / "run/checkpoints")
    (newest / "optimizer.safetensors").unlink()
    (tmp_path / "run/summary.json").unlink()
    with pytest.raises(CheckpointError, match=r"optimizer\.safetensors"):
        finetune.run(recipe, f"resume={newest}")
    finetune.run(recipe, "resume=auto")
    assert "optimizer.safetensors" in capfd.readouterr().err
    for name, weight in last_state(tmp_path / "run")["trainable"].items():
        assert torch.equal(weight, straight[name] if name in straight else straight["trainable"][name])


def test_b80_other_rank_is_refused_with_both_values(tiny: dict[str, Any]) -> None:
    """Case B80: resuming with another LoRA rank stops and names the difference."""
    finetune.run(tiny)
    with pytest.raises(CheckpointError, match=r"adapter\.rank: 4 in the checkpoint, 8 now"):
        finetune.run(changed(tiny, adapter__rank=8, train__max_steps=12), "resume=auto")


def test_b84_resume_with_another_batch_keeps_the_sample_position(tiny: dict[str, Any], tmp_path: Path) -> None:
    """Case B84: stopped after 3 steps of 4 rows; goes on from row 12 with batches of 2: 6 more steps end the epoch."""
    recipe = changed(tiny, train__epochs=1)
    del recipe["train"]["max_steps"]
    with pytest.MonkeyPatch.context() as patch:
        stop_at(patch, 3)
        with pytest.raises(StoppedError):
            finetune.run(recipe)
    summary = finetune.run(changed(recipe, train__batch=2), "resume=auto").summary
    assert summary["steps"] == 3 + 6
    assert sum(column(tmp_path / "run", "tokens")) == sum(
        column_of_whole_epoch(changed(recipe, run__dir=str(tmp_path / "whole")), tmp_path / "whole")
    )


def column_of_whole_epoch(recipe: dict[str, Any], folder: Path) -> list[float]:
    finetune.run(recipe)
    return column(folder, "tokens")


def test_b85_finished_run_says_so_and_goes_on_when_raised(
    tiny: dict[str, Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Case B85: resuming an ended run says 'already complete'; changed data are reported; raised steps go on."""
    finetune.run(tiny)
    assert finetune.run(tiny, "resume=auto").summary["steps"] == 8
    assert "already complete at step 8" in capfd.readouterr().err
    assert finetune.run(changed(tiny, train__max_steps=10), "resume=auto").summary["steps"] == 10
    write_jsonl(tmp_path / "train.jsonl", alpaca_rows(24, seed=5))
    capfd.readouterr()
    finetune.run(changed(tiny, train__max_steps=10), "resume=auto")
    assert "the training data changed" in capfd.readouterr().err


def test_run_folder_with_a_run_is_not_overwritten(tiny: dict[str, Any]) -> None:
    finetune.run(tiny)
    with pytest.raises(CheckpointError, match="already holds a run"):
        finetune.run(tiny)


def test_checkpoints_kept_and_best_protected(tiny: dict[str, Any], tmp_path: Path) -> None:
    """Case B76: keep 1 and keep_best: the best is never rotated out."""
    recipe = changed(
        tiny, optimizer__lr=0.3, evaluate__every=2, checkpoint={"every": 1, "keep": 1, "keep_best": "eval_loss"}
    )
    finetune.run(recipe)
    evaluations = [(line["eval_loss"], line["step"]) for line in lines(tmp_path / "run") if "eval_loss" in line]
    best = min(evaluations[1:])[1]
    names = {path.name for path in store.complete(tmp_path / "run/checkpoints")}
    assert names == {f"step-{best:07d}", "step-0000008"}
    assert json.loads((tmp_path / "run/summary.json").read_text())["best_step"] == best


def test_early_stop(tiny: dict[str, Any], tmp_path: Path) -> None:
    """A rate that only harms: stops after 2 evaluations without gain, not at step 40."""
    recipe = changed(tiny, optimizer__lr=1.0, train__max_steps=40, train__stop_after=2, evaluate__every=2)
    summary = finetune.run(recipe).summary
    assert summary["steps"] < 40
    losses = column(tmp_path / "run", "eval_loss")[1:]
    assert min(losses) == losses[-3]


def test_nan_names_the_row_and_keeps_the_checkpoint(
    tiny: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loss that is not a number stops before the update, names the row, and the last checkpoint stays loadable."""
    from finetune.tasks.text import TextTask

    loss_sum = TextTask.loss_sum

    def poisoned(self: TextTask, model: Any, batch: Any, plan: Any) -> torch.Tensor:
        loss = loss_sum(self, model, batch, plan)
        return loss * float("nan") if 13 in batch.row_ids.tolist() else loss

    monkeypatch.setattr(TextTask, "loss_sum", poisoned)
    recipe = changed(tiny, plan__micro_batch=2, checkpoint__every=1)
    with pytest.raises(DivergedError, match=r"training row 13 \(data row 14\)"):
        finetune.run(recipe)
    path, _ = store.newest(tmp_path / "run/checkpoints")
    steps = len(column(tmp_path / "run", "loss"))
    assert (path is None and steps == 0) or int(path.name.split("-")[1]) == steps


def test_read_only_target_fails_before_step_one(tiny: dict[str, Any], tmp_path: Path) -> None:
    """Case B105: the save path is tried before training."""
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="file"):
        finetune.run(changed(tiny, run__dir=str(tmp_path / "file")))
    assert not (tmp_path / "file" / "metrics.jsonl").exists()


def test_killed_while_exporting_resumes_to_the_result(tiny: dict[str, Any], tmp_path: Path) -> None:
    finetune.run(tiny)
    shutil.rmtree(tmp_path / "run/adapter")
    (tmp_path / "run/summary.json").unlink()
    result = finetune.run(tiny, "resume=auto")
    assert (result.result / "adapter_model.safetensors").exists()
