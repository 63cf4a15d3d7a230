"""Words that report: plan, data, runs, and what they print as JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from finetune.__main__ import main
from finetune.config.load import load_recipe, save_recipe
from finetune.environment import Launch

PLAN_KEYS = {
    "fits",
    "plan",
    "gpu_bytes",
    "host_bytes",
    "seconds_per_step",
    "tokens_per_s",
    "smallest",
    "alternatives",
    "reasons",
}


def report(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> Any:
    """The JSON that a word prints, which must be all of its output."""
    assert main([*words, "--json"]) == code
    return json.loads(capsys.readouterr().out)


def make_run(folder: Path, *words: str, **figures: Any) -> None:
    folder.mkdir(parents=True)
    base = {"model": {"path": "builtin:tiny"}, "data": {"path": "x.jsonl"}, "train": {"batch": 4}}
    save_recipe(load_recipe(base, words, None, Launch()), folder / "recipe.yaml")
    if figures:
        (folder / "summary.json").write_text(json.dumps(figures))


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    after = {"eval_loss": 1.5}
    make_run(Path("runs/a"), "optimizer.lr=1e-4", steps=10, loss_first=3.0, loss_last=2.0, eval_after=after)
    make_run(Path("runs/b"), "optimizer.lr=2e-4", "adapter.kind=lora", steps=10, loss_first=3.0, loss_last=1.0)
    make_run(Path("runs/c"))
    Path("runs/c/summary.json").write_text("{broken")
    Path("runs/no-run").mkdir()
    return tmp_path


def test_runs_are_listed_with_what_they_came_to(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = {row["run"]: row for row in report(capsys, "runs")}
    assert sorted(rows) == ["a", "b", "c"]
    assert (rows["a"]["loss_last"], rows["a"]["eval_loss"], rows["a"]["state"]) == (2.0, 1.5, "finished")
    assert (rows["b"]["method"], rows["b"]["eval_loss"]) == ("lora", None)
    assert (rows["c"]["state"], rows["c"]["loss_last"]) == ("no summary", None)
    assert main(["runs"]) == 0
    assert "no summary" in capsys.readouterr().out
    assert report(capsys, "runs", "path=elsewhere") == []


def test_two_runs_are_compared(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for names in ("a,b", "runs/a, runs/b"):
        found = report(capsys, "runs", f"diff={names}")
        assert found["recipe"] == {"adapter.kind": ["none", "lora"], "optimizer.lr": [1e-4, 2e-4]}
        assert found["figures"]["loss_last"] == [2.0, 1.0]
    assert main(["runs", "diff=a,b"]) == 0
    assert "optimizer.lr" in capsys.readouterr().out
    assert main(["runs", "diff=a,bb"]) == 2
    assert "did you mean run=runs/b?" in capsys.readouterr().err


@pytest.mark.parametrize(("hardware", "recipe"), [("1x24GB,64GB", "quickstart"), ("8x80GB,1TB", "lora_llama3")])
def test_plan_prints_the_promised_keys(hardware: str, recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = report(capsys, "plan", f"recipe={recipe}", f"hardware={hardware}")
    assert set(found) >= PLAN_KEYS
    assert found["fits"] is True
    assert main(["plan", f"recipe={recipe}", f"hardware={hardware}"]) == 0
    assert "GiB" in capsys.readouterr().out


def test_a_plan_that_does_not_fit_ends_with_3_and_says_so_in_json_too(capsys: pytest.CaptureFixture[str]) -> None:
    found = report(capsys, "plan", "recipe=full_llama3", "hardware=1x24GB,32GB", code=3)
    assert found["fits"] is False
    assert found["plan"] is None
    assert set(found) >= PLAN_KEYS
    needed = found["gpu_bytes"]["step"]["total"]
    assert needed == found["smallest"]["bytes"] > 24e9
    assert 0 < found["smallest"]["lacks"] < needed
    fitting = [change["keys"] for change in found["changes"] if change["fits"]]
    assert ["adapter.kind=lora"] in fitting
    assert main(["plan", "recipe=full_llama3", "hardware=1x24GB,32GB"]) == 3
    assert "GiB" in capsys.readouterr().err


def test_data_reports_every_split(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"input": f"She go to school {n}.", "target": f"She goes to school {n}."} for n in range(20)]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = (
        *("data", "recipe=quickstart", "model.path=builtin:tiny", "data.template=grammar"),
        *(f"data.path={path}", f"data.valid_path={path}"),
    )
    found = report(capsys, *words)
    assert list(found) == ["train", "valid"]
    assert main(list(words)) == 0
    assert "20" in capsys.readouterr().out


def test_data_that_cannot_be_trained_on_are_shown_first(capsys: pytest.CaptureFixture[str]) -> None:
    Path("rows.jsonl").write_text(json.dumps({"instruction": "say a long thing", "output": "x"}) + "\n")
    Path("job.yaml").write_text(
        "{model: {path: builtin:tiny}, train: {batch: 1}, data: {path: rows.jsonl, template: alpaca, max_tokens: 8}}"
    )
    found = report(capsys, "data", "recipe=job.yaml", code=2)
    assert found["train"]["dropped"] == {"no trainable token left after truncation": 1}


def test_a_template_that_does_not_load_is_listed_with_its_fault(capsys: pytest.CaptureFixture[str]) -> None:
    Path("data_templates").mkdir()
    Path("data_templates/broken.yaml").write_text("kind: nonsense\n")
    rows = {row["name"]: row for row in report(capsys, "templates")}
    assert rows["broken"]["about"] == "does not load: kind is 'nonsense'"
    assert rows["broken"]["path"] == "data_templates/broken.yaml"
    assert rows["alpaca"]["about"] == "An instruction, perhaps with an input, and its answer."


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["adapter.targets=q_prj"],
            "adapter.targets: 'q_prj' matches nothing in LlamaForCausalLM; did you mean 'q_proj'?",
        ),
        (["adapter.modules_to_save=lm_hed"], "adapter.modules_to_save: 'lm_hed' matches nothing with weights"),
        (["adapter.ranks.v_prj=4"], "v_prj"),
        (["adapter.kind=none", "train.modules=mpl"], "train.modules: 'mpl' matches no parameter of LlamaForCausalLM"),
        (["adapter.kind=none", "train.freeze=embed"], "train.freeze: 'embed' matches no parameter"),
        (["adapter.kind=none", "train.last_blocks=33"], "train.last_blocks=33, but LlamaForCausalLM has 32 blocks"),
    ],
)
def test_a_plan_refuses_layers_that_the_model_does_not_have(
    capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    """As training does, without weights and without a hub, and before anything of the plan is printed."""
    assert main(["plan", "recipe=lora_llama3", "hardware=1x80GB,256GB", *words]) == 2
    shown = capsys.readouterr()
    assert message in shown.err
    assert not shown.out


@pytest.mark.parametrize("path", ["meta-llama/Meta-Llama-3-8B", "Qwen/Qwen2.5-7B", "mistralai/Mistral-7B-v0.3"])
def test_a_plan_knows_the_layers_of_each_family(capsys: pytest.CaptureFixture[str], path: str) -> None:
    words = ["adapter.targets=q_proj,layers.0.mlp.down_proj", "adapter.modules_to_save=lm_head", f"model.path={path}"]
    assert main(["plan", "recipe=lora_llama3", "hardware=8x80GB,1TB", *words]) == 0
    assert "Plan" in capsys.readouterr().out
