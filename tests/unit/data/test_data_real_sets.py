"""Real sets: those in examples/, and larger ones in the folder that FINETUNE_SHARED_DATA names."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from finetune.contracts import IGNORED
from tests.unit.data import chat_forms
from tests.unit.data.chat_forms import tiny_tokenizer

ROOT = Path(__file__).resolve().parents[3]
EXAMPLES = ROOT / "examples"
SHARED = Path(os.environ.get("FINETUNE_SHARED_DATA", ""))
TEMPLATES = {
    "chat-chitchat": "messages",
    "grammar-synth": "grammar",
    "summ-debian": "summarize",
    "text-austen": "text",
    "chat-coffee": "messages",
    "instruct-human": "alpaca",
    "gsm8k": "alpaca",
    "grammar-eracond": "grammar",
}
IN_EXAMPLES = tuple(TEMPLATES)[:4]
ROWS = 40
"""Rows of each set that are prepared here; their files are read whole."""


def prepare_some(prepared: Callable[..., Any], folder: Path, template: str, form: str | None) -> Any:
    return prepared(
        str(folder / "train.jsonl"),
        tiny_tokenizer(form),
        template=template,
        valid_path=str(folder / "valid.jsonl"),
        max_rows=ROWS,
        max_tokens=8192,
        on_long="split" if template == "text" else "truncate",
        pack=True,
        recipe={"evaluate": {"max_rows": 5}},
    )


def check_set(prepared: Callable[..., Any], folder: Path, template: str) -> None:
    form = chat_forms.LLAMA3 if template != "text" else None
    splits = prepare_some(prepared, folder, template, form)
    for rows in (splits.train, splits.evaluate["valid"]):
        report = rows.report
        assert not report.dropped
        assert report.rows_kept == report.rows_in
        assert report.trained_tokens == int(rows.trained.sum()) > 0
        assert report.stopped_documents >= report.rows_kept - report.truncated
        assert not [warning for warning in report.warnings if "trained tokens of" in warning]
        for row in rows.documents[:5]:
            end = "</s>" if template == "text" else "<|eot_id|>"
            assert row.labels[0] == IGNORED
            if len(row.input_ids) < 8192 and template != "text":
                tokenizer = tiny_tokenizer()
                assert row.labels[-1] == tokenizer.convert_tokens_to_ids(end)


@pytest.mark.parametrize("name", IN_EXAMPLES)
def test_examples_load_with_their_templates(prepared: Callable[..., Any], name: str) -> None:
    check_set(prepared, EXAMPLES / name, TEMPLATES[name])


def test_examples_are_small_and_carry_licences() -> None:
    assert sorted(path.name for path in EXAMPLES.iterdir() if path.is_dir()) == sorted(IN_EXAMPLES)
    assert sum(path.stat().st_size for path in EXAMPLES.rglob("*") if path.is_file()) <= 2 * 2**20
    for name in IN_EXAMPLES:
        assert (EXAMPLES / name / "LICENSE").stat().st_size > 300
        assert "Rows taken" in (EXAMPLES / name / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", TEMPLATES)
def test_shared_sets_load_with_their_templates(prepared: Callable[..., Any], name: str) -> None:
    folder = SHARED / name
    if not (folder / "train.jsonl").is_file():
        pytest.skip("FINETUNE_SHARED_DATA names no folder with this set")
    check_set(prepared, folder, TEMPLATES[name])
