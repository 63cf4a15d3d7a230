"""Corners of streamed runs: models and adapters at their smallest, draws that cannot be keyed, changes of placement midway."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoTokenizer

import finetune
from finetune.errors import DivergedError, ModelError
from finetune.memory.streaming.slots import Slots
from finetune.models.builtin import resolve
from finetune.train import loop
from finetune.train.job import Job
from finetune.train.streamed import Streamed
from tests.conftest import changed, method
from tests.runs.history import column, same_bits
from tests.runs.test_streamed_families import GROUPED, WIDTHS, job
from tests.runs.test_streamed_resume import streamed


def folder_of(place: Path, kind: str, **settings: Any) -> str:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, kind)(**settings))
    model.save_pretrained(place)
    AutoTokenizer.from_pretrained(resolve("builtin:tiny")).save_pretrained(place)
    return str(place)


CORNERS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "one block, full": ("none", {"num_hidden_layers": 1}, {}),
    "one block, lora": ("lora", {"num_hidden_layers": 1}, {}),
    "an adapter on the head alone": ("lora", {}, {"adapter__targets": ["lm_head"]}),
    "a micro-batch that is not full": ("none", {}, {"train__batch": 5}),
}


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("name", CORNERS)
def test_corners_have_the_bits_of_resident_runs(tiny: dict[str, Any], tmp_path: Path, name: str, fast: bool) -> None:
    kind, form, keys = CORNERS[name]
    recipe = job(tiny, folder_of(tmp_path / "model", "LlamaConfig", **{**GROUPED, **form}), kind, False)
    recipe = changed(recipe, plan__fast_block=fast, plan__head_placement="device", **keys)
    resident = finetune.run(changed(recipe, run__dir="resident", plan__weights="resident"))
    moved = finetune.run(changed(recipe, run__dir="streamed"))
    for figure in ("loss", "grad_norm"):
        assert column(moved.dir, figure) == column(resident.dir, figure)
    assert same_bits(moved.dir, resident.dir)


DRAWN = {
    "attention": ("LlamaConfig", {**GROUPED, "attention_dropout": 0.3}, "has attention_dropout=0.3"),
    "hidden and attention": (
        "GPTNeoXConfig", {**WIDTHS, "attention_dropout": 0.3, "hidden_dropout": 0.3}, "has attention_dropout=0.3",
    ),
    "routing": (
        "MixtralConfig", {**GROUPED, "num_local_experts": 4, "router_jitter_noise": 0.3}, "draws at random inside its functions",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DRAWN)
def test_draws_that_would_differ_in_the_recomputation_are_refused(
    tiny: dict[str, Any], tmp_path: Path, name: str
) -> None:
    """A block runs twice; a mask drawn anew the second time would give a wrong gradient and a healthy loss."""
    kind, form, said = DRAWN[name]
    with pytest.raises(ModelError, match=said):
        finetune.run(job(tiny, folder_of(tmp_path / "model", kind, **form), "lora", False))


@pytest.mark.parametrize("kind", ["none", "lora"])
def test_own_blocks_are_fetched_in_the_order_of_fast_ones(
    tiny: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """And each before its turn: a fetch asked for only in its own turn could not run beside any computation."""
    place = folder_of(tmp_path / "model", "LlamaConfig", **{**GROUPED, "num_hidden_layers": 5})
    notes: list[tuple[str, int]] = []
    fetch, using, step = Slots._fetch, Slots.using, Streamed.step
    monkeypatch.setattr(Slots, "_fetch", lambda self, slot, n: (notes.append(("fetch", n)), fetch(self, slot, n))[1])
    monkeypatch.setattr(Slots, "using", lambda self, n: (notes.append(("use", n)), using(self, n))[1])
    steps: list[list[tuple[str, int]]] = []

    def noted(self: Streamed, *given: Any) -> Any:
        notes.clear()
        losses = step(self, *given)
        steps.append(list(notes))
        return losses

    monkeypatch.setattr(Streamed, "step", noted)
    for fast in (False, True):
        recipe = changed(job(tiny, place, kind, False), plan__fast_block=fast, train__max_steps=2)
        finetune.run(changed(recipe, run__dir=f"fast-{fast}"))
    own, fast_blocks = steps[1], steps[3]
    assert own == fast_blocks
    turns = [number for what, number in own if what == "use"]
    assert turns == [0, 1, 2, 3, 4, 4, 3, 2, 1, 0]
    assert [number for what, number in own if what == "fetch"] == [2, 3, 4, 2, 1, 0]


@pytest.mark.parametrize("optimizer", ["adamw", "adamw8bit", "lion"])
@pytest.mark.parametrize("kind", ["none", "lora"])
def test_changes_of_placement_midway_end_with_the_same_weights_and_state(
    tiny: dict[str, Any], tmp_path: Path, kind: str, optimizer: str
) -> None:
    """Resident, streamed, resident again, the clip active: what is saved does not say where it was."""
    recipe = changed(streamed(tiny, kind), optimizer__name=optimizer, train__max_grad_norm=0.05)
    recipe = changed(recipe, schedule__name="constant", data__valid_path=None)
    straight = finetune.run(changed(recipe, run__dir=str(tmp_path / "straight"), train__max_steps=6))
    for first, second in (("resident", "streamed"), ("streamed", "resident")):
        folder = str(tmp_path / f"{first}-first")
        for steps, weights in ((2, first), (4, second), (6, first)):
            keys = {"run__dir": folder, "train__max_steps": steps, "plan__weights": weights}
            finetune.run(changed(recipe, resume="auto", **keys))
        assert same_bits(straight.dir, Path(folder))
        assert column(Path(folder), "loss") == column(straight.dir, "loss")


def test_ends_that_move_between_two_parts_of_a_run_are_told(
    tiny: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Their sums are made in another order on the host, so bits may differ."""
    recipe = changed(streamed(tiny, "none"), plan__fast_block=True, run__dir=str(tmp_path / "run"))
    finetune.run(changed(recipe, train__max_steps=1))
    capsys.readouterr()
    ends = {"plan__embedding_placement": "host", "plan__head_placement": "host"}
    finetune.run(changed(recipe, train__max_steps=2, resume="auto", **ends))
    told = "".join(capsys.readouterr())
    assert "bits may: embedding_placement device then, host now; head_placement device then, host now" in told


@pytest.mark.parametrize("kind", ["none", "lora"])
def test_a_head_that_begins_or_ceases_to_visit_midway_changes_no_bit(
    tiny: dict[str, Any], tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """On the device, visiting, resident; evaluated, saved and resumed between; the change is told."""
    recipe = changed(streamed(tiny, kind), optimizer__name="adamw8bit", train__max_grad_norm=0.05)
    recipe = changed(recipe, schedule__name="constant", evaluate__every=1, plan__embedding_placement="device")
    straight = finetune.run(changed(recipe, run__dir=str(tmp_path / "straight"), train__max_steps=6))
    folder = str(tmp_path / "moved")
    places = ({"plan__head_placement": "device"}, {"plan__head_placement": "visit"}, {"plan__weights": "resident"})
    for steps, keys in zip((2, 4, 6), places, strict=True):
        finetune.run(changed(recipe, run__dir=folder, train__max_steps=steps, resume="auto", **keys))
    assert same_bits(straight.dir, Path(folder))
    assert column(Path(folder), "loss") == column(straight.dir, "loss")
    assert "head_placement device then, visit now" in "".join(capsys.readouterr())


@pytest.mark.parametrize("ends", [False, True])
def test_rows_of_a_step_that_diverges_are_looked_at_on_a_whole_model(
    tiny: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: bool
) -> None:
    """The model is visited meanwhile: what was promised is made, and both ends are where their inputs are."""
    jobs: list[Job] = []
    step = loop.train_step

    def poisoned(own: Job, rows: list[int], steps: int, loaded: Any = None) -> Any:
        jobs[:] = [own]
        if own.progress.step == 2:
            own.model.backbone.norm.weight.data[0] = float("nan")
        return step(own, rows, steps, loaded)

    monkeypatch.setattr(loop, "train_step", poisoned)
    recipe = changed(streamed(tiny, "none", ends), data__valid_path=None, run__dir=str(tmp_path / "run"))
    visits: list[int] = []
    visiting = Streamed.visiting

    def counted(self: Streamed) -> Any:
        visits.append(jobs[0].progress.step if jobs else -1)
        return visiting(self)

    monkeypatch.setattr(Streamed, "visiting", counted)
    with pytest.raises(DivergedError, match="nothing was updated") as caught:
        finetune.run(recipe)
    assert "training row" in str(caught.value)
    assert visits[-1] == 2
    (own,) = jobs
    stream = own.update.stream
    assert stream is not None
    assert stream.deferred is not None
    assert stream.deferred.pending == []
    assert not any(tall.pending for tall in stream.ends.trained)


def test_a_skipped_fp16_step_of_streamed_adapters_leaves_the_bits_of_a_resident_one(
    tiny: dict[str, Any], tmp_path: Path
) -> None:
    """Large adapters overflow at the first loss scale; the skips, the scale and all weights are the same."""
    recipe = changed(streamed(method(tiny, "lora"), "lora"), model__precision="fp16", data__valid_path=None)
    recipe = changed(recipe, train__max_steps=4, optimizer__lr=10.0, schedule__name="constant")
    resident = finetune.run(changed(recipe, run__dir=str(tmp_path / "resident"), plan__weights="resident"))
    moved = finetune.run(changed(recipe, run__dir=str(tmp_path / "streamed")))
    for figure in ("loss", "loss_scale", "skipped_steps"):
        assert str(column(moved.dir, figure)) == str(column(resident.dir, figure))
    assert column(moved.dir, "skipped_steps")[-1] > 0
    assert same_bits(moved.dir, resident.dir)
