"""The report: what it shows, as values and on the terminal."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from typing import Any

import pytest
from rich.console import Console

from finetune.data.preflight import as_dict, check, facts, headline, render
from finetune.errors import DataError
from tests.unit.data.chat_forms import CHATML, tiny_tokenizer

TALK = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello"},
    {"role": "user", "content": "Bye"},
    {"role": "assistant", "content": "Bye!"},
]


def test_the_sample_marks_what_is_trained(prepared: Callable[..., Any]) -> None:
    report = prepared([{"messages": TALK}]).train.report
    assert [text for text, trained in report.sample if trained] == ["Hello<|im_end|>", "Bye!<|im_end|>"]
    assert "".join(text for text, _ in report.sample) == tiny_tokenizer(CHATML).apply_chat_template(
        TALK, tokenize=False
    )


def test_figures(prepared: Callable[..., Any]) -> None:
    rows = [{"text": "a" * (length - 1)} for length in (2, 4, 4, 10, 30)]
    report = prepared(rows, tiny_tokenizer(), template="text", pack=True, max_tokens=32).train.report
    assert (report.tokens, report.trained_tokens, report.documents, report.duplicates) == (50, 45, 5, 1)
    assert report.supervised_ratio == 0.9
    assert report.rows == 2
    assert report.efficiency == 50 / 64
    assert report.lengths == {"shortest": 2, "5%": 2, "median": 4, "95%": 26, "longest": 30}
    assert report.histogram[:3] == ((4, 3), (7, 0), (10, 1))
    assert sum(count for _, count in report.histogram) == 5
    assert report.stop == "</s>"
    assert report.stopped_documents == 5


def test_the_report_is_plain_values(prepared: Callable[..., Any]) -> None:
    values = json.loads(json.dumps(as_dict(prepared([{"messages": TALK}]).train.report)))
    assert values["trained_tokens"] == 7
    assert values["split"] == "train"
    assert 0 < values["supervised_ratio"] < 1
    assert values["sample"][1] == {"text": "Hello<|im_end|>", "trained": True}


def test_the_terminal_shows_counts_reasons_and_warnings(prepared: Callable[..., Any]) -> None:
    rows = [{"messages": TALK}, {"messages": []}, {"messages": TALK[:1]}]
    report = prepared(rows, on_bad_row="skip", max_tokens=64).train.report
    console = Console(file=io.StringIO(), width=120)
    console.print(render(report))
    shown = console.file.getvalue()
    assert "rows in / kept / dropped 3 / 1 / 2" in " ".join(shown.split())
    assert "dropped: 'messages' is empty" in shown
    assert "1 (line 2)" in shown
    assert "64 tokens (data.max_tokens)" in shown
    assert "Hello<|im_end|>" in shown
    assert "[" not in shown.split("first document")[0]


def test_text_in_brackets_is_no_markup(prepared: Callable[..., Any]) -> None:
    report = prepared([{"text": "[bold]x[/bold] [/]"}], tiny_tokenizer(), template="text").train.report
    console = Console(file=io.StringIO(), width=120)
    console.print(render(report))
    assert "[bold]x[/bold] [/]" in console.file.getvalue()


def test_check_can_wait_for_the_report(prepared: Callable[..., Any]) -> None:
    splits = prepared(
        [{"text": "abcdefgh"}], tiny_tokenizer(), template="text", max_tokens=4, on_long="drop", strict=False
    )
    report = splits.train.report
    assert len(splits.train) == 0
    assert report.sample == ()
    assert report.lengths == {}
    assert report.efficiency == 0.0
    assert render(report)
    assert len(splits.train.fingerprint) == 64
    with pytest.raises(DataError, match=r"0 of 1 rows left"):
        check(report)


def test_trained_tokens_that_read_otherwise_are_reported(prepared: Callable[..., Any]) -> None:
    """A tokenizer that changes text (here: lower case) makes the labels read differently from the text to learn."""
    from tokenizers import normalizers

    tokenizer = tiny_tokenizer(CHATML)
    tokenizer.backend_tokenizer.normalizer = normalizers.Lowercase()
    warnings = prepared([{"messages": TALK}], tokenizer).train.report.warnings
    assert any("trained tokens of" in warning and "'hello<|im_end|>" in warning for warning in warnings)


def test_truncated_rows_are_named(prepared: Callable[..., Any]) -> None:
    rows = [{"text": "a"}, *[{"text": "a" * 30}] * 6]
    report = prepared(rows, tiny_tokenizer(), template="text", max_tokens=16).train.report
    assert report.truncated == 6
    assert report.places["truncated"] == ("line 2", "line 3", "line 4", "line 5", "line 6")
    assert ("truncated", "6 (line 2, line 3, line 4, line 5, line 6, ...)") in facts(report)
    assert "6 (line 2, line 3, line 4, line 5, line 6, ...) truncated at 16 tokens" in headline(report)


def test_split_documents_are_counted_once_each(prepared: Callable[..., Any]) -> None:
    """Two documents of 17 tokens: two pieces of 8 each, and a last token that teaches nothing."""
    rows = [{"text": "a" * 16}] * 2
    report = prepared(rows, tiny_tokenizer(), template="text", max_tokens=8, on_long="split").train.report
    assert report.documents == 4
    assert report.notes == {
        "documents cut into several": 2,
        "documents whose last piece of one token was left out": 2,
    }


def test_plain_texts_have_no_prompts(prepared: Callable[..., Any]) -> None:
    splits = prepared(
        [{"text": "a" * 9}], tiny_tokenizer(), template="text", max_tokens=1, on_long="split", strict=False
    )
    report = splits.train.report
    assert report.notes == {}
    shown = " ".join(report.warnings)
    assert "prompt" not in shown
    assert "1 of 1 rows had no trainable token left: the first token of a piece is never trained" in shown
    with pytest.raises(DataError, match="the first token of a piece is never trained") as caught:
        check(report)
    assert "prompt" not in str(caught.value)
