"""A run's health: divergence named with rows and the last good checkpoint, warnings, and the trial of the longest rows."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

import finetune
from finetune.errors import DivergedError, NothingFitsError
from finetune.telemetry.health import LEAST, ZERO_STEPS, Health
from finetune.train import probe
from tests.conftest import alpaca_rows, changed, method, write_jsonl
from tests.runs.history import column, lines, same_bits


def test_a_diverging_step_names_step_rows_and_the_last_good_checkpoint(
    tiny: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from finetune.tasks.text import TextTask

    plain = TextTask.loss_sum

    def poisoned(self: TextTask, model: Any, batch: Any, plan: Any) -> torch.Tensor:
        loss = plain(self, model, batch, plan)
        return loss * float("nan") if torch.is_grad_enabled() or 7 in batch.row_ids.tolist() else loss

    recipe = changed(tiny, checkpoint={"every": 2}, train__max_steps=3)
    finetune.run(recipe)
    (tmp_path / "run/summary.json").unlink()
    monkeypatch.setattr(TextTask, "loss_sum", poisoned)
    with pytest.raises(DivergedError) as caught:
        finetune.run(changed(recipe, train__max_steps=6), "resume=auto")
    text = str(caught.value)
    assert text.splitlines()[0].count("step 4: the loss is nan") == 1
    assert "row" in text
    assert f"the last good checkpoint is {tmp_path}/run/checkpoints/step-0000003" in text.replace("\n", " ")


def test_updates_in_backward_look_at_the_loss_before(tiny: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    from finetune.tasks.text import TextTask

    plain = TextTask.loss_sum
    monkeypatch.setattr(TextTask, "loss_sum", lambda *words: plain(*words) * float("inf"))
    pins = {"plan__optimizer_in_backward": True, "train__max_grad_norm": None, "evaluate": {"samples": 0}}
    recipe = changed(tiny, **pins)
    del recipe["data"]["valid_path"]
    with pytest.raises(
        DivergedError, match=r"(?s)step 1: the loss is inf; nothing was updated.*no checkpoint yet"
    ) as caught:
        finetune.run(recipe)
    assert "norm" not in str(caught.value).splitlines()[0]


def test_gradient_norms_are_always_logged(tiny: dict[str, Any], tmp_path: Path) -> None:
    for name, pins in {
        "clipped": {},
        "unclipped": {"train__max_grad_norm": None},
        "in_backward": {"train__max_grad_norm": None, "plan__optimizer_in_backward": True},
    }.items():
        finetune.run(changed(tiny, run__dir=str(tmp_path / name), **pins))
        assert len(column(tmp_path / name, "grad_norm")) == 8
        assert all(norm > 0 for norm in column(tmp_path / name, "grad_norm"))
    assert column(tmp_path / "in_backward", "grad_norm") == column(tmp_path / "unclipped", "grad_norm")


def test_a_spike_is_told_once_with_step_loss_and_rows() -> None:
    health = Health([])
    draw = random.Random(0)
    quiet = [health.spike(step, 2.0 - step / 100 + draw.uniform(-0.05, 0.05), [1]) for step in range(60)]
    assert quiet == [None] * 60
    told = health.spike(61, 9.0, [4, 7])
    assert told is not None
    assert told.startswith("step 61: the loss is 9.0000, its median over the last 60 steps 1.7")
    assert told.endswith("rows 4, 7")
    assert health.spike(62, 8.0, [5]) is None
    assert health.spike(63, 1.4, [5]) is None
    assert health.spike(64, 9.0, [6]) is not None
    assert Health([]).spike(1, 1e9, [1]) is None
    early = Health([])
    assert [early.spike(step, 2.0 if step < LEAST - 1 else 50.0, [1]) for step in range(LEAST)] == [None] * LEAST


def test_a_run_warns_of_a_spike(tiny: dict[str, Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """One row of noise among rows that are all alike."""
    same = [{"instruction": "a cat", "input": "", "output": "a dog"}] * 119
    odd = {"instruction": "a cat", "input": "", "output": "QZ#~}{ @@ WQX \\\\ 901 %%"}
    write_jsonl(tmp_path / "train.jsonl", [*same[:60], odd, *same[60:]])
    recipe = changed(tiny, train={"batch": 4, "epochs": 3}, adapter={"kind": "none"})
    del recipe["data"]["valid_path"]
    finetune.run(recipe)
    warned = [line for line in capfd.readouterr().err.splitlines() if "its median over the last" in line]
    # Epoch 0 meets it before there is a past, and epochs 1 and 2 once each.
    assert len(warned) == 2
    assert all(" 60" in line.partition("rows")[2] for line in warned)


def test_zero_gradients_are_told_once_by_name_and_lora_does_not_cry_wolf(
    tiny: dict[str, Any], capfd: pytest.CaptureFixture[str]
) -> None:
    health = Health(["a", "b", "c"])
    first = [1.0, 0.0, 0.0]
    for step in range(ZERO_STEPS):
        norms = torch.tensor([*first[:2], 1.0 if step else 0.0])
        longest = float(health.count_zeros(norms))
        assert longest == step + 1
        told = health.zero_gradients(longest)
        assert (told is None) == (step < ZERO_STEPS - 1)
    assert told == f"1 of 3 trained parameters got a gradient of zero in {ZERO_STEPS} steps: b"
    for _ in range(2 * ZERO_STEPS):
        assert health.zero_gradients(float(health.count_zeros(torch.tensor([1.0, 0.0, 1.0])))) is None
    finetune.run(changed(tiny, train__max_steps=ZERO_STEPS + 2))
    assert "gradient of zero" not in capfd.readouterr().err


@pytest.mark.parametrize(
    "pins",
    [{}, {"plan__optimizer_in_backward": True, "train__max_grad_norm": None}, {"model__precision": "fp16"}],
    ids=["plain", "in backward", "fp16"],
)
@pytest.mark.parametrize("kind", ["none", "lora"])
def test_b135_a_run_with_a_trial_of_its_longest_rows_is_the_same_run(
    tiny: dict[str, Any], tmp_path: Path, kind: str, pins: dict[str, Any]
) -> None:
    recipe = changed(method(tiny, kind), **pins)
    if kind == "lora":
        recipe = changed(recipe, adapter__dropout=0.3)
    for name in (True, False):
        finetune.run(changed(recipe, plan__probe=name, run__dir=str(tmp_path / str(name))))
    assert same_bits(tmp_path / "True", tmp_path / "False")
    for figure in ("loss", "grad_norm", "eval_loss"):
        assert column(tmp_path / "True", figure) == column(tmp_path / "False", figure)


def test_b135_the_longest_rows_come_first_and_too_little_memory_shows_at_once(
    tiny: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of random length with the longest last: it is tried before step 1, and out-of-memory names it there."""
    rows = alpaca_rows(40)
    rows[-1]["output"] = "the cat " * 60
    write_jsonl(tmp_path / "train.jsonl", rows)
    seen: list[tuple[int, ...]] = []
    plain = probe.backward

    def noted(job: Any, batch: Any, count: float) -> torch.Tensor:
        seen.append(tuple(batch.row_ids.tolist()))
        assert batch.input_ids.shape[1] == max(job.splits.train.lengths)
        if len(seen) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried")
        return plain(job, batch, count)

    monkeypatch.setattr(probe, "backward", noted)
    recipe = changed(tiny, plan={"probe": True, "micro_batch": 2}, train__max_steps=1)
    finetune.run(recipe)
    assert len(seen) == 1
    assert len(seen[0]) == 2
    assert 39 in seen[0]
    with pytest.raises(
        NothingFitsError, match=r"out of memory in a trial of the longest rows before the first step"
    ) as caught:
        finetune.run(changed(recipe, run__dir=str(tmp_path / "short")))
    assert "without plan.micro_batch=2 there is a smaller plan" in str(caught.value)
    assert not [line for line in lines(tmp_path / "short") if "loss" in line]


@pytest.mark.parametrize(("asked", "tried"), [("auto", 0), (False, 0), (True, 1)])
def test_b135_a_cpu_runs_without_the_trial_unless_asked(
    tiny: dict[str, Any], monkeypatch: pytest.MonkeyPatch, asked: object, tried: int
) -> None:
    rows: list[int] = []
    real = probe.backward
    monkeypatch.setattr(
        probe, "backward", lambda job, batch, count: (rows.append(len(batch.lengths)), real(job, batch, count))
    )
    finetune.run(changed(tiny, train__max_steps=1, plan__probe=asked))
    assert len(rows) == tried


def test_b134_evaluation_takes_the_same_memory_for_any_number_of_rows() -> None:
    """Case B134: 50 and 200 rows of a vocabulary of 30,000: only sums are kept, so the peaks are equal."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from finetune.contracts import Plan
    from finetune.data.loader import collate
    from finetune.generate.evaluate import Evaluator
    from finetune.models.decoder import assemble
    from finetune.models.shapes import shape_of
    from finetune.tasks.text import TextTask
    from tests.numerics.tiny_jobs import CONFIG, CPU, LENGTH, World, packed_rows
    from tests.unit.planner.live_bytes import LiveBytes

    config = LlamaConfig(**{**CONFIG, "vocab_size": 30_000, "num_hidden_layers": 1})
    model = assemble(LlamaForCausalLM(config), None, shape_of(config), "tiny")
    evaluator = Evaluator(TextTask(0), model, Plan("cpu", 5, False, 0), World(0, 1, CPU), "fp32", lambda: None)
    peaks = []
    for count in (50, 200):
        rows = packed_rows(count)
        assert len(collate(rows, 0).lengths) == count
        with LiveBytes() as live:
            figures = evaluator.losses({"valid": rows})
        assert 10 < figures["eval_loss"] < 11
        peaks.append(live.peak)
    assert peaks[1] <= 1.02 * peaks[0]
    assert peaks[1] < 3 * 5 * LENGTH * 30_000 * 4


def test_levers_of_a_whole_run_change_no_bit_and_go_on_after_a_stop(tiny: dict[str, Any], tmp_path: Path) -> None:
    """All bitwise levers at once, pinned on a CPU, with state that is restored to the host."""
    from tests.runs.test_resume import interrupted

    plain = changed(tiny, adapter__rank=64, adapter__dropout=0.2, data__pack=True, data__max_tokens=256)
    plain = changed(plain, train__max_grad_norm=None, plan={"loss_chunk": 0, "micro_batch": 4})
    finetune.run(changed(plain, run__dir=str(tmp_path / "plain")))
    pins = {
        "activation_checkpointing": "selective",
        "activation_offload": True,
        "optimizer_in_backward": True,
        "optimizer_placement": "host",
        "embedding_placement": "host",
    }
    levered = changed(plain, plan={**plain["plan"], **pins})
    interrupted(levered, tmp_path / "levers", 3)
    assert same_bits(tmp_path / "plain", tmp_path / "levers")
    for figure in ("loss", "grad_norm", "eval_loss"):
        assert column(tmp_path / "levers", figure) == column(tmp_path / "plain", figure)
    assert json.loads((tmp_path / "levers/summary.json").read_text())["result"]
