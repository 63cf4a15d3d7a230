"""What is done with a run: its files read by plain peft and transformers, exports, answers, evaluation, trackers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import finetune
from finetune.__main__ import main
from finetune.config.load import load_recipe
from finetune.contracts import Model
from finetune.data.dataset import prepare
from finetune.errors import InputError
from finetune.models.builtin import resolve
from finetune.models.load import load_model, load_tokenizer
from finetune.train import after
from tests.conftest import alpaca_rows, changed, method, write_jsonl
from tests.runs.history import column

IDS = torch.arange(40).reshape(2, 20) * 5 + 3


def logits(module: torch.nn.Module) -> torch.Tensor:
    module.eval()
    with torch.no_grad():
        return module(input_ids=IDS, use_cache=False).logits


def live(recipe: dict[str, Any], run: Path) -> Model:
    """The trained model as this toolkit loads it."""
    return load_model(after.finished_recipe(run), torch.device("cpu"), "fp32", training=False)


def test_adapter_loads_in_plain_peft_and_merges(tiny: dict[str, Any], tmp_path: Path) -> None:
    from peft import AutoPeftModelForCausalLM, PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    run = finetune.run(tiny)
    wanted = logits(live(tiny, run.dir).module)
    base = AutoModelForCausalLM.from_pretrained(resolve("builtin:tiny"))
    assert not torch.allclose(logits(base), wanted, atol=1e-3)
    torch.testing.assert_close(logits(PeftModel.from_pretrained(base, str(run.result))), wanted, atol=1e-5, rtol=0)
    torch.testing.assert_close(
        logits(AutoPeftModelForCausalLM.from_pretrained(str(run.result))), wanted, atol=1e-5, rtol=0
    )
    done = after.export(run.dir, "merged", tmp_path / "merged", None)
    assert done["largest_logit_difference"] < 1e-5
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(logits(merged), wanted, atol=1e-5, rtol=0)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "merged")
    assert "<|im_start|>" in tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False)


def test_full_fine_tune_leaves_a_model_folder(tiny: dict[str, Any]) -> None:
    from transformers import AutoModelForCausalLM

    run = finetune.run(method(tiny, "none"))
    reloaded = AutoModelForCausalLM.from_pretrained(run.result)
    assert reloaded.dtype == torch.float32
    torch.testing.assert_close(logits(reloaded), logits(live(tiny, run.dir).module), atol=1e-6, rtol=0)
    base = AutoModelForCausalLM.from_pretrained(resolve("builtin:tiny"))
    moved = [name for name, p in base.named_parameters() if not torch.equal(p, reloaded.get_parameter(name))]
    assert len(moved) == len(list(base.named_parameters()))


def test_qlora_trains_and_merges_into_sixteen_bits(tiny: dict[str, Any], tmp_path: Path) -> None:
    """Evaluation stands before the first step: the 4-bit layers must train as well after it (and do)."""
    run = finetune.run(changed(tiny, model__base="nf4"))
    assert run.summary["eval_after"]["eval_loss"] < run.summary["eval_before"]["eval_loss"] - 0.05
    plain = finetune.run(changed(tiny, run__dir=str(tmp_path / "plain")))
    assert column(run.dir, "loss") == pytest.approx(column(plain.dir, "loss"), abs=0.15)
    done = after.export(run.dir, "merged", tmp_path / "merged", None)
    assert done["largest_logit_difference"] < 1e-3


def test_b01_qlora_accumulation(tiny: dict[str, Any], tmp_path: Path) -> None:
    recipe = changed(tiny, model__base="nf4", optimizer__lr=1e-3)
    for micro in (4, 1):
        finetune.run(changed(recipe, plan__micro_batch=micro, run__dir=str(tmp_path / f"m{micro}")))
    assert column(tmp_path / "m1", "loss") == pytest.approx(column(tmp_path / "m4", "loss"), abs=1e-5)


def test_go_on_from_an_adapter(tiny: dict[str, Any], tmp_path: Path) -> None:
    first = finetune.run(tiny)
    second = finetune.run(changed(tiny, adapter__path=str(first.result), run__dir=str(tmp_path / "second")))
    assert second.summary["eval_before"]["eval_loss"] == pytest.approx(
        first.summary["eval_after"]["eval_loss"], abs=1e-5
    )
    assert second.summary["eval_after"]["eval_loss"] < second.summary["eval_before"]["eval_loss"]


def test_several_evaluation_sets(tiny: dict[str, Any], tmp_path: Path) -> None:
    other = write_jsonl(tmp_path / "other.jsonl", alpaca_rows(5, seed=9))
    run = finetune.run(changed(tiny, evaluate={"samples": 0, "every": 4, "sets": {"other": str(other)}}))
    assert set(run.summary["eval_after"]) == {"eval_loss", "other/eval_loss"}
    assert len(column(run.dir, "other/eval_loss")) == 3
    again = after.evaluate(run.dir)
    assert again == pytest.approx(run.summary["eval_after"], abs=1e-6)


def test_samples_before_and_after(tiny: dict[str, Any], capfd: pytest.CaptureFixture[str]) -> None:
    run = finetune.run(changed(tiny, evaluate__samples=3, generate__max_tokens=5))
    before, last = run.summary["samples_before"], run.summary["samples_after"]
    assert len(before) == len(last) == 3
    assert [sample["prompt"] for sample in before] == [sample["prompt"] for sample in last]
    assert before != last
    held_out = [row["output"] for row in alpaca_rows(7, seed=1)[:3]]
    assert [sample["expected"] for sample in last] == held_out
    assert "sample 3" in capfd.readouterr().err


def test_words_after_a_run(tiny: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = finetune.run(changed(tiny, train__max_steps=2))
    capsys.readouterr()
    assert main(["generate", f"run={run.dir}", "prompt=the cat", "generate.max_tokens=4", "--json"]) == 0
    asked = json.loads(capsys.readouterr().out)
    assert asked["prompt"] == "the cat"
    assert len(asked["answer"]) == 4
    assert main(["evaluate", f"run={run.dir}", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["eval_loss"] == pytest.approx(run.summary["eval_after"]["eval_loss"])
    assert main(["export", f"run={run.dir}", "to=adapter", f"path={tmp_path / 'out'}", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["largest_logit_difference"] < 1e-5
    assert main(["export", f"run={run.dir}", "to=fp8"]) == 2
    assert main(["runs", "--json"]) == 0


def test_hub_export_without_a_network_is_one_message(tiny: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    run = finetune.run(changed(tiny, train__max_steps=1))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(InputError, match="HF_HUB_OFFLINE"):
        after.export(run.dir, "hub", None, "me/mine")
    with pytest.raises(InputError, match="repo=NAME/REPOSITORY"):
        after.export(run.dir, "hub", None, None)


def test_tensorboard_gets_every_step(tiny: dict[str, Any]) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = finetune.run(changed(tiny, run__trackers=["tensorboard"]))
    (folder,) = {path.parent for path in run.dir.rglob("events.out.tfevents.*") if path.parent.name == "tiny"}
    events = EventAccumulator(str(folder))
    events.Reload()
    assert [event.step for event in events.Scalars("loss")] == list(range(1, 9))
    assert [event.value for event in events.Scalars("loss")] == pytest.approx(column(run.dir, "loss"), rel=1e-6)


def test_a_tracker_that_is_not_installed_is_named_first(tiny: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(InputError, match="mlflow"):
        finetune.run(changed(tiny, run__trackers=["mlflow"]))
    assert not (tmp_path / "run").exists()


def test_recipe_of_a_run_runs_again_to_the_same_losses(tiny: dict[str, Any], tmp_path: Path) -> None:
    first = finetune.run(tiny)
    finetune.run(first.dir / "recipe.yaml", f"run.dir={tmp_path / 'again'}")
    assert column(tmp_path / "again", "loss") == column(first.dir, "loss")
    assert load_recipe(first.dir / "recipe.yaml").train.batch == 4


def test_sets_of_their_own_names_without_valid_rows(tiny: dict[str, Any], tmp_path: Path) -> None:
    hard = write_jsonl(tmp_path / "hard.jsonl", alpaca_rows(5, seed=9))
    recipe = changed(
        tiny,
        data__valid_path=None,
        evaluate={"samples": 0, "every": 2, "sets": {"hard": str(hard)}},
        checkpoint={"keep_best": "hard/eval_loss"},
        train={"batch": 4, "max_steps": 4},
    )
    run = finetune.run(recipe)
    assert set(run.summary["eval_after"]) == {"hard/eval_loss"}
    losses = column(run.dir, "hard/eval_loss")
    assert len(losses) == 3
    assert run.summary["best_step"] == 2 * losses.index(min(losses[1:]))
    assert set(after.evaluate(run.dir)) == {"hard/eval_loss"}


def test_targets_by_pattern(tiny: dict[str, Any]) -> None:
    run = finetune.run(changed(tiny, adapter__targets="model.layers.0.mlp.*_proj,*.[qv]_proj", train__max_steps=1))
    facts = json.loads((run.result / "adapter_config.json").read_text())
    assert facts["r"] == 4
    assert len(load_model(after.finished_recipe(run.dir), "cpu", "fp32").trainable()) == 2 * (3 + 2 * 2)


def test_a_full_run_takes_no_other_model(tiny: dict[str, Any]) -> None:
    run = finetune.run(changed(method(tiny, "none"), train__max_steps=1))
    with pytest.raises(InputError, match="its result is the model"):
        after.finished_recipe(run.dir, ["model.path=builtin:smollm2-135m"])


def test_a_hub_that_cannot_be_reached_is_one_message(tiny: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    class UnreachableError(Exception):
        """As httpx.ConnectError: neither an OSError nor a ValueError."""

    def refuse(*arguments: Any, **keywords: Any) -> None:
        raise UnreachableError

    run = finetune.run(changed(tiny, train__max_steps=1))
    monkeypatch.setattr(huggingface_hub.HfApi, "create_repo", refuse)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.delenv("TRANSFORMERS_OFFLINE", raising=False)
    with pytest.raises(InputError, match="the upload failed: UnreachableError"):
        after.export(run.dir, "hub", None, "me/mine")


def test_a_run_folder_in_ones_home_and_going_on_with_ones_own(
    tiny: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    run = finetune.run(changed(tiny, run__dir="~/mine", train__max_steps=1))
    assert run.dir == tmp_path / "mine"
    Path("runs").mkdir()
    run.dir.rename("runs/tiny-2-20260101-000000")
    other = finetune.run({**changed(tiny, run={}, train__max_steps=1), "resume": "auto"})
    assert other.dir.name != "tiny-2-20260101-000000"
    again = finetune.run({**changed(tiny, run={}, train__max_steps=1), "resume": "auto"})
    assert again.dir.resolve() == other.dir.resolve()


def test_evaluate_shows_how_much_it_measured(tiny: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    """Rows, tokens and trained tokens of the held-out rows: in the table, as JSON, and in training's own line."""
    run = finetune.run(tiny)
    capsys.readouterr()
    assert main(["evaluate", f"run={run.dir}", "--json"]) == 0
    shown = capsys.readouterr()
    found = json.loads(shown.out)
    recipe = load_recipe(run.dir / "recipe.yaml")
    report = prepare(recipe, load_tokenizer(recipe.model)).evaluate["valid"].report
    counts = {"rows": 7, "tokens": report.tokens, "trained_tokens": report.trained_tokens}
    assert found.pop("data") == {"valid": counts}
    assert found == after.evaluate(run.dir)
    assert f"data  valid: 7 documents; {report.tokens:,} tokens, {report.trained_tokens:,} of them trained" in shown.err
    assert main(["evaluate", f"run={run.dir}", "evaluate.max_rows=3"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["rows", "3"] in lines
    assert [line[0] for line in lines if line] == ["metric", "eval_loss", "rows", "tokens", "trained"]
