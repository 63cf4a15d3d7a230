"""Data through whole runs: templates and stop tokens in what is saved, refusals with their exit code, the shared sets."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

import finetune
from finetune.__main__ import main
from finetune.data.own_chat import prepare_tokenizer
from finetune.models.load import load_tokenizer
from finetune.train import after
from tests.conftest import method, write_jsonl

TALK = [
    {"role": "user", "content": "Two and two?"},
    {"role": "assistant", "content": "Four."},
]
SHARED = os.environ.get("FINETUNE_SHARED_DATA", "")
SETS = {
    "chat-chitchat": "messages",
    "chat-coffee": "messages",
    "grammar-eracond": "grammar",
    "grammar-synth": "grammar",
    "gsm8k": "alpaca",
    "instruct-human": "alpaca",
    "summ-debian": "summarize",
    "text-austen": "text",
}


def with_data(recipe: dict[str, Any], path: Path, **data: Any) -> dict[str, Any]:
    kept = {key: value for key, value in recipe["data"].items() if key in ("max_tokens",)}
    train = {**recipe["train"], "max_steps": 1}
    return {**recipe, "train": train, "data": {**kept, "path": str(path), "template": "messages", **data}}


@pytest.mark.parametrize("kind", ["lora", "none"])
def test_b35_the_template_that_was_trained_is_in_every_output(tiny: dict[str, Any], tmp_path: Path, kind: str) -> None:
    """Also by a second start with the same data, and in a merged model; mistral's turns end otherwise than the model's."""
    from transformers import AutoTokenizer, GenerationConfig

    path = write_jsonl(tmp_path / "talk.jsonl", [{"messages": TALK}] * 4)
    recipe = with_data(method(tiny, kind), path, template="mistral")
    recipe["evaluate"] = {}
    run = finetune.run(recipe)
    outputs = [run.result]
    if kind == "lora":
        after.export(run.dir, "merged", tmp_path / "merged", None)
        outputs.append(tmp_path / "merged")
    wanted = "<|bos|>[INST] Two and two?[/INST] Four.<|eos|>"
    for output in outputs:
        tokenizer = AutoTokenizer.from_pretrained(str(output))
        assert tokenizer.apply_chat_template(TALK, tokenize=False) == wanted
    tokenizer = AutoTokenizer.from_pretrained(str(outputs[-1]))
    stops = GenerationConfig.from_pretrained(str(outputs[-1])).eos_token_id
    stops = stops if isinstance(stops, list) else [stops]
    assert tokenizer.convert_tokens_to_ids("<|eos|>") in stops


def test_b19_the_turn_end_of_a_template_is_where_generation_stops(tiny: dict[str, Any], tmp_path: Path) -> None:
    recipe = after.load_recipe({**tiny, "data": {**tiny["data"], "template": "chatml"}})
    tokenizer = load_tokenizer(recipe.model)
    tokenizer.chat_template = None
    told: list[str] = []
    prepare_tokenizer(tokenizer, recipe.data, told.append)
    assert told == []
    from finetune.models.chat_tokens import turn_end

    assert turn_end(tokenizer) == tokenizer.convert_tokens_to_ids("<|im_end|>")


def test_the_data_command_ends_with_2_and_names_file_line_and_remedy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def told(rows: list[Any], *words: str) -> str:
        path = write_jsonl(tmp_path / "rows.jsonl", rows)
        base = ["data", "recipe=quickstart", "model.path=builtin:tiny", "evaluate.max_rows=null"]
        assert main([*base, f"data.path={path}", "data.valid_path=null", *words]) == 2
        message = capsys.readouterr().err
        assert "Traceback" not in message
        assert "rows.jsonl" in message
        assert "->" in message
        return message

    unknown = [{"messages": TALK}, {"messages": [{"role": "wizard", "content": "x"}]}]
    assert "line 2, message 1: unknown role 'wizard'" in told(unknown, "data.template=messages")
    assert "the column 'output' that the template 'alpaca' needs is missing" in told(
        [{"instruction": "a", "otput": "b"}], "data.template=alpaca"
    )
    untrained = [{"messages": [TALK[0], {**TALK[1], "train": False}]}]
    assert "0 of 1 rows left, so 0 tokens would be trained" in told(untrained, "data.template=messages")
    long = [{"instruction": "a" * 500, "output": "b"}]
    assert "no trainable token left" in told(long, "data.template=alpaca", "data.max_tokens=64")
    cut = [{"instruction": "a", "output": "b" * 500}]
    assert "is never trained" in told(cut, "data.template=alpaca", "data.max_tokens=128")
    (tmp_path / "rows.jsonl").write_text("")
    assert main(["data", "recipe=quickstart", f"data.path={tmp_path / 'rows.jsonl'}", "data.template=text"]) == 2
    assert "the file is empty (0 bytes)" in capsys.readouterr().err


def test_the_data_command_shows_documents_and_their_trained_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", [{"messages": TALK}] * 3)
    words = ["data", "recipe=quickstart", "model.path=builtin:tiny", "data.template=messages", "evaluate.max_rows=null"]
    words += [f"data.path={path}", "data.valid_path=null"]
    assert main([*words, "--rows", "2"]) == 0
    shown = capsys.readouterr().out
    assert "first document" in shown
    assert "document 2" in shown
    assert "document 3" not in shown
    assert "3 (2 repeat an earlier one)" in shown
    assert main([*words, "rows=1", "--json"]) == 0
    values = json.loads(capsys.readouterr().out)["train"]
    assert [piece["text"] for piece in values["documents_shown"][0] if piece["trained"]] == ["Four.<|im_end|>"]
    assert values["duplicates"] == 2
    assert main([*words, "rows=x"]) == 2


def test_other_data_on_the_command_line_set_the_recipes_own_held_out_rows_aside(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", [{"messages": TALK}] * 20)
    words = ["data", "recipe=quickstart", "model.path=builtin:tiny", "data.template=messages", f"data.path={path}"]
    assert main([*words, "--json"]) == 0
    told = capsys.readouterr()
    assert "belongs to the recipe's own data; 5% of the rows of data.path are held out instead" in told.err
    assert json.loads(told.out)["valid"]["rows_in"] == 1
    assert main([*words, f"data.valid_path={path}", "--json"]) == 0
    told = capsys.readouterr()
    assert "belongs to the recipe" not in told.err
    assert json.loads(told.out)["valid"]["rows_in"] == 20


@pytest.mark.parametrize("name", SETS)
def test_a_shared_set_trains(name: str, tmp_path: Path) -> None:
    """Skipped without FINETUNE_SHARED_DATA, the folder of the sets."""
    file = Path(SHARED) / name / "train.jsonl"
    if not SHARED or not file.is_file():
        pytest.skip("FINETUNE_SHARED_DATA names no folder with this set")
    words = [f"data.path={file}", f"data.template={SETS[name]}", "train.max_steps=2", "model.path=builtin:tiny"]
    run = finetune.run("quickstart", *words, f"run.dir={tmp_path / name}", "data.max_rows=200", "evaluate.max_rows=5")
    assert run.summary["steps"] == 2
    assert 0 < run.summary["loss_last"] < 10


@pytest.mark.timeout(60)
def test_a_pipe_is_refused_before_it_is_hashed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(tmp_path / "rows.jsonl")
    words = [
        "recipe=quickstart",
        "model.path=builtin:tiny",
        "data.template=text",
        f"data.path={tmp_path / 'rows.jsonl'}",
    ]
    assert main(["data", *words]) == 2
    assert "this is a pipe, not a file" in capsys.readouterr().err


def test_a_stream_has_the_roles_and_the_system_text_of_the_recipe(tmp_path: Path) -> None:
    from finetune.config.schema import DataSection
    from finetune.data.record_streams import stream_records

    talk = [{"from": "caller", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]
    path = write_jsonl(tmp_path / "rows.jsonl", [{"messages": talk}])
    data = DataSection(path=str(path), roles={"caller": "user"}, system="Be brief.")
    (row, where) = next(stream_records(data, 0))
    assert isinstance(row, dict)
    assert row["messages"][0]["from"] == "user"
    assert row["system"] == "Be brief."
    assert where.endswith("line 1")
