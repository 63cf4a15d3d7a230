"""Streamed runs that are stopped, killed or diverge, and what is done with them: nothing is lost and no bit changes.

Kills are of real processes at drawn moments. The suite makes a few; more, with another seed:
    python -m tests.runs.test_streamed_resume 20 7
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

import finetune
from finetune.__main__ import main
from finetune.errors import DivergedError, InputError
from finetune.train import after
from tests.conftest import alpaca_rows, changed, method, write_jsonl
from tests.runs.history import column, last_state, same_bits
from tests.runs.test_after_a_run import IDS, logits
from tests.runs.test_resume import interrupted

ENDS = {"embedding_placement": "host", "head_placement": "host", "fast_block": True}
VISIT = {**ENDS, "head_placement": "visit"}
KILLS = 5


def streamed(tiny: dict[str, Any], kind: str, ends: bool | str = False) -> dict[str, Any]:
    """`ends`: embedding and head on the host in parts, or the head on a visit."""
    plan = {"weights": "streamed", "micro_batch": 2, "loss_chunk": 0, "activation_checkpointing": True}
    own = VISIT if ends == "visit" else ENDS if ends else {}
    return changed(method(tiny, kind), plan={**plan, **own})


@pytest.mark.parametrize("ends", [False, True, "visit"])
@pytest.mark.parametrize("kind", ["none", "lora"])
def test_interrupted_run_ends_with_the_same_bits(
    tiny: dict[str, Any], tmp_path: Path, kind: str, ends: bool | str
) -> None:
    """SIGTERM after a step whose update is only promised; weights and optimizer state equal bit for bit at the end."""
    recipe = changed(streamed(tiny, kind, ends), data__pack=True, data__max_tokens=256, optimizer__name="adamw8bit")
    recipe = changed(recipe, adapter__dropout=0.5) if kind == "lora" else recipe
    finetune.run(changed(recipe, run__dir=str(tmp_path / "straight")))
    interrupted(recipe, tmp_path / "stopped", 3)
    assert same_bits(tmp_path / "straight", tmp_path / "stopped")
    for name in ("step", "loss", "lr", "grad_norm", "eval_loss"):
        assert column(tmp_path / "stopped", name) == column(tmp_path / "straight", name)


@pytest.mark.parametrize("ends", [False, True, "visit"])
@pytest.mark.parametrize("kind", ["none", "lora"])
def test_looking_at_a_run_changes_nothing(tiny: dict[str, Any], tmp_path: Path, kind: str, ends: bool | str) -> None:
    """Evaluations, samples, checkpoints and the probe flush what is promised and leave the same bits."""
    recipe = changed(streamed(tiny, kind, ends), train__max_steps=5, data__valid_path=None)
    finetune.run(changed(recipe, run__dir=str(tmp_path / "alone")))
    watched = changed(
        recipe, run__dir=str(tmp_path / "watched"), data__valid_path=tiny["data"]["valid_path"], plan__probe=True,
        evaluate={"every": 1, "samples": 2}, generate__max_tokens=3, checkpoint__every=2,
    )  # fmt: skip
    finetune.run(watched)
    assert column(tmp_path / "watched", "loss") == column(tmp_path / "alone", "loss")
    assert column(tmp_path / "watched", "grad_norm") == column(tmp_path / "alone", "grad_norm")
    assert same_bits(tmp_path / "alone", tmp_path / "watched")
    assert len(column(tmp_path / "watched", "eval_loss")) == 6


@pytest.mark.parametrize("ends", [False, True])
@pytest.mark.parametrize("kind", ["none", "lora"])
def test_its_result_is_that_of_a_resident_run(
    tiny: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str, ends: bool
) -> None:
    """Reloaded by plain transformers or peft, and by the toolkit's own words."""
    from peft import AutoPeftModelForCausalLM
    from transformers import AutoModelForCausalLM

    recipe = changed(streamed(tiny, kind, ends), train__max_steps=4)
    run = finetune.run(recipe)
    plain = {"weights": "resident", "micro_batch": 2, "loss_chunk": 0, "activation_checkpointing": True}
    plain["fast_block"] = ends
    other = finetune.run(changed(recipe, plan=plain, run__dir=str(tmp_path / "resident")))
    load = (AutoModelForCausalLM if kind == "none" else AutoPeftModelForCausalLM).from_pretrained
    first, second = logits(load(str(run.result))), logits(load(str(other.result)))
    assert first.shape == (*IDS.shape, first.shape[-1])
    if ends:
        torch.testing.assert_close(first, second, atol=2e-5, rtol=0)
    else:
        assert torch.equal(first, second)
    capsys.readouterr()
    assert main(["evaluate", f"run={run.dir}", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["eval_loss"]
    assert found == pytest.approx(run.summary["eval_after"]["eval_loss"], abs=1e-5)
    assert main(["generate", f"run={run.dir}", "prompt=the cat", "generate.max_tokens=4", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["answer"]) == 4
    assert main(["export", f"run={run.dir}", "to=merged", f"path={tmp_path / 'out'}", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["largest_logit_difference"] < 1e-5
    torch.testing.assert_close(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "out")), first, atol=1e-5, rtol=0)
    with pytest.raises(InputError, match="a full fine-tune has no adapter") if kind == "none" else nullcontext():
        after.export(run.dir, "adapter", tmp_path / "adapter", None)


@pytest.mark.parametrize("ends", [False, True, "visit"])
def test_nan_leaves_the_last_promised_step(
    tiny: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: bool | str
) -> None:
    """The diverging step's forward has already made the promised updates of some blocks; after a flush all are made, none
    twice, and nothing of the bad step is in them."""
    from finetune.train import loop
    from finetune.train.job import Job

    recipe = changed(streamed(tiny, "none", ends), data__valid_path=None)
    straight = finetune.run(changed(recipe, run__dir=str(tmp_path / "straight"), train__max_steps=3,
                                    schedule__name="constant"))  # fmt: skip
    jobs: list[Job] = []
    step = loop.train_step

    def poisoned(job: Job, rows: list[int], steps: int, loaded: Any = None) -> Any:
        jobs[:] = [job]
        if job.progress.step == 3:
            job.model.backbone.norm.weight.data[0] = float("nan")  # where no deferred update is
        return step(job, rows, steps, loaded)

    monkeypatch.setattr(loop, "train_step", poisoned)
    with pytest.raises(DivergedError):
        finetune.run(changed(recipe, run__dir=str(tmp_path / "bad"), schedule__name="constant"))
    (job,) = jobs
    assert job.progress.step == 3
    job.update.wait()
    wanted = last_state(straight.dir)["trainable"]
    for name, parameter in job.model.trainable().items():
        if name.endswith("model.norm.weight"):
            parameter = torch.cat([wanted[name][:1], parameter.detach()[1:]])
        assert torch.equal(parameter, wanted[name]), name


def kill_at_random(recipe: dict[str, Any], kills: int, seed: int) -> list[int]:
    """Runs `recipe` in processes that are killed with SIGKILL so many times, each at a drawn moment some steps after the last,
    then lets it end. The steps that were recorded at each kill."""
    draw, folder = random.Random(seed), Path(recipe["run"]["dir"])
    metrics = folder / "metrics.jsonl"
    # Forked, since importing torch takes longer than the run.
    fork = multiprocessing.get_context("fork")
    seen: list[int] = []
    for _ in range(kills):
        process = fork.Process(target=_run, args=(recipe,), daemon=True)
        process.start()
        wanted = (seen[-1] if seen else 0) + draw.randint(1, 4)
        while process.is_alive() and not (metrics.exists() and metrics.read_bytes().count(b"\n") >= wanted):
            time.sleep(0.002)
        time.sleep(draw.uniform(0, 0.03))
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL, "the run ended before it could be killed"
        seen.append(int(max(column(folder, "step"), default=0)))
    process = fork.Process(target=_run, args=(recipe,), daemon=True)
    process.start()
    process.join()
    assert process.exitcode == 0
    return seen


def _run(recipe: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    finetune.run(recipe, "resume=auto")


def killing_recipe(tiny: dict[str, Any], steps: int) -> dict[str, Any]:
    recipe = changed(streamed(tiny, "none"), train__max_steps=steps, data__valid_path=None, checkpoint__every=1)
    return changed(recipe, optimizer__name="adamw8bit", schedule__name="linear")


def test_killed_at_random_moments_it_reaches_the_same_weights(tiny: dict[str, Any], tmp_path: Path) -> None:
    recipe = killing_recipe(tiny, 60)
    finetune.run(changed(recipe, run__dir=str(tmp_path / "straight"), checkpoint__every=None))
    seen = kill_at_random(recipe, KILLS, seed=1)
    assert len(seen) == KILLS
    assert 5 <= max(seen) < 60
    assert same_bits(tmp_path / "straight", tmp_path / "run")
    assert column(tmp_path / "run", "loss") == column(tmp_path / "straight", "loss")


def _many(kills: int, seed: int) -> None:
    """The same with as many kills as asked for, in a folder of its own."""
    with tempfile.TemporaryDirectory() as place:
        os.chdir(place)
        rows = write_jsonl(Path("train.jsonl"), alpaca_rows(24))
        tiny = {
            "device": "cpu", "model": {"path": "builtin:tiny"},
            "data": {"path": str(rows.resolve()), "template": "alpaca", "max_tokens": 512},
            "train": {"batch": 4}, "evaluate": {"samples": 0}, "run": {"dir": str(Path("run").resolve())},
        }  # fmt: skip
        recipe = killing_recipe(tiny, 12 * kills)
        finetune.run(changed(recipe, run__dir=str(Path("straight").resolve()), checkpoint__every=None))
        seen = kill_at_random(recipe, kills, seed)
        print(f"killed after steps {seen}; the same bits at the end: {same_bits(Path('straight'), Path('run'))}")


if __name__ == "__main__":
    _many(int(sys.argv[1]), int(sys.argv[2]))
