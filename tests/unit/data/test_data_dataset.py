"""Prepared splits: truncation, dropping, packing, held-out rows, and counts that add up."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from finetune.contracts import IGNORED, Row
from finetune.data.dataset import RowSet
from finetune.errors import DataError
from tests.unit.data import chat_forms
from tests.unit.data.chat_forms import CHATML, tiny_tokenizer

LENGTHS = (3, 5, 8, 13, 21)


def documents(lengths: tuple[int, ...] = LENGTHS) -> list[dict[str, str]]:
    """Texts of which the tiny tokenizer makes that many tokens, the end token included."""
    return [{"text": chr(ord("a") + n) * (length - 1)} for n, length in enumerate(lengths)]


def test_b13_no_label_crosses_documents(prepared: Callable[..., Any]) -> None:
    """For n documents the trained targets are the sum of their lengths less one each."""
    train = prepared(documents((4, 6)), tiny_tokenizer(), template="text", pack=True, max_tokens=10).train
    assert len(train) == 1
    assert train[0].document_lengths == (4, 6)
    assert train[0].sources == (0, 1)
    assert int((train[0].labels[1:] != IGNORED).sum()) == 3 + 5 == train.trained[0]
    assert (train[0].labels == IGNORED).nonzero()[0].tolist() == [0, 4]
    many = prepared(documents(), tiny_tokenizer(), template="text", pack=True, max_tokens=21).train
    assert int(many.trained.sum()) == sum(LENGTHS) - 5


COUNTS = {
    "truncate": (5, {}, 2, 3 + 5 + 8 + 8 + 8),
    "drop": (3, {"longer than data.max_tokens": 2}, 0, 3 + 5 + 8),
    "split": (5, {}, 0, 3 + 5 + 8 + 13 + 21),
}
"""data.on_long: rows kept, dropped, truncated, and tokens left, of LENGTHS cut at 8."""


@pytest.mark.parametrize("pack", [False, True])
@pytest.mark.parametrize("on_long", COUNTS)
def test_b16_every_row_is_kept_or_counted(prepared: Callable[..., Any], pack: bool, on_long: str) -> None:
    kept, dropped, truncated, tokens = COUNTS[on_long]
    train = prepared(documents(), tiny_tokenizer(), template="text", max_tokens=8, on_long=on_long, pack=pack).train
    report = train.report
    assert (report.rows_in, report.rows_kept, report.dropped, report.truncated) == (5, kept, dropped, truncated)
    assert report.rows_in == report.rows_kept + sum(report.dropped.values())
    assert report.tokens == tokens == int(train.lengths.sum())
    assert int(train.lengths.max()) <= 8
    assert {source for row in train for source in row.sources} == set(range(kept))
    if on_long == "drop":
        assert report.places["longer than data.max_tokens"] == ("line 4", "line 5")
    if on_long == "split":
        assert [len(row.input_ids) for row in train.documents] == [3, 5, 8, 8, 5, 8, 8, 5]
        assert report.notes == {"documents cut into several": 2}
        assert report.trained_tokens == tokens - 8, "each piece's first token is not trained"


def test_b16_error_names_the_long_rows(prepared: Callable[..., Any]) -> None:
    with pytest.raises(DataError) as caught:
        prepared(documents(), tiny_tokenizer(), template="text", max_tokens=8, on_long="error")
    assert "2 of 5 rows are longer than data.max_tokens=8" in str(caught.value)
    assert "line 4 (13 tokens)" in str(caught.value)
    assert "line 5 (21 tokens)" in str(caught.value)


def test_split_leaves_out_a_last_piece_of_one_token_and_says_so(prepared: Callable[..., Any]) -> None:
    report = prepared(documents((9, 3)), tiny_tokenizer(), template="text", max_tokens=8, on_long="split").train.report
    assert report.tokens == 8 + 3
    assert report.notes["documents whose last piece of one token was left out"] == 1


def asked(prompt: int, answer: int) -> dict[str, Any]:
    """A chat row of which the prompt takes `prompt` + 4 tokens and the answer `answer`, its end token included."""
    return {
        "messages": [{"role": "user", "content": "p" * prompt}, {"role": "assistant", "content": "a" * (answer - 1)}],
    }


SHORT = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ '[INST]' + m.content + '[/INST]' }}"
    "{% else %}{{ m.content + '</s>' }}{% endif %}{% endfor %}"
)


def test_b39_rows_emptied_by_truncation_are_dropped_and_counted(prepared: Callable[..., Any]) -> None:
    rows = [asked(8, 3), asked(2, 3), asked(1, 3), asked(2, 4)]
    report = prepared(rows, tiny_tokenizer(SHORT), max_tokens=8).train.report
    assert report.dropped == {"no trainable token left after truncation": 1}
    assert report.places["no trainable token left after truncation"] == ("line 1",)
    assert (report.documents, report.trained_tokens) == (3, 3 + 3 + 4)
    assert any("1 of 4 rows had no trainable token left" in warning for warning in report.warnings)


def test_b39_b40_all_rows_emptied_by_truncation_name_the_limit(prepared: Callable[..., Any]) -> None:
    with pytest.raises(DataError) as caught:
        prepared([asked(8, 3)] * 4, tiny_tokenizer(SHORT), max_tokens=8)
    message = str(caught.value)
    assert "4 of 4 rows have no trainable token left" in message
    assert "data.max_tokens=8" in message
    assert "the median prompt has 10 tokens" in message
    assert "role" not in message
    assert "template" not in message


def test_b40_rows_without_a_turn_to_learn_name_roles_and_template(prepared: Callable[..., Any]) -> None:
    with pytest.raises(DataError) as caught:
        prepared([{"messages": [{"role": "user", "content": "Hi"}]}] * 3)
    message = str(caught.value)
    assert "0 of 3 rows left" in message
    assert "3 no turn to learn (no assistant message" in message
    assert "data.template=messages" in message
    assert "max_tokens" not in message


def test_b41_the_recipes_length_wins_and_its_source_is_shown(prepared: Callable[..., Any]) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.model_max_length = 16
    train = prepared(documents((24,)), tokenizer, template="text", max_tokens=32).train
    assert train.lengths.tolist() == [24]
    assert (train.report.max_tokens, train.report.limit_source) == (32, "data.max_tokens")
    assert any("names a limit of 16 tokens" in warning for warning in train.report.warnings)


def test_b43_all_rows_filtered_out_stops(prepared: Callable[..., Any]) -> None:
    with pytest.raises(DataError) as caught:
        prepared(documents((9, 10, 11)), tiny_tokenizer(), template="text", max_tokens=8, on_long="drop")
    assert "0 of 3 rows left after filtering (3 longer than data.max_tokens; limit 8)" in str(caught.value)
    assert caught.value.exit_code == 2


def test_the_stop_token_must_be_trained_somewhere(prepared: Callable[..., Any]) -> None:
    with pytest.raises(DataError, match=r"stop token '</s>' is never trained: 2 of 2 documents are cut off"):
        prepared([asked(1, 30), asked(2, 30)], tiny_tokenizer(SHORT), max_tokens=8)
    with pytest.raises(DataError, match=r"no stop token is ever trained"):
        prepared([asked(1, 3)], tiny_tokenizer(SHORT.replace("</s>", "")), max_tokens=8)
    with pytest.raises(DataError, match=r"no stop token is ever trained"):
        prepared([{"input": "a", "target": "b"}], tiny_tokenizer(eos=None), template="grammar")
    report = prepared([{"text": "abc"}], tiny_tokenizer(eos=None), template="text").train.report
    assert "no document trains a stop token: the model will not learn where to stop" in report.warnings


def test_b29_one_mask_rule_for_training_and_evaluation(prepared: Callable[..., Any], write: Callable[..., str]) -> None:
    talk = {
        "messages": [{"role": role, "content": "a" * n} for n, role in enumerate(["user", "assistant"] * 3, start=1)]
    }
    other = write([talk], "other.jsonl")
    for pack in (False, True):
        for train_on, count in (("assistant", 3 + 5 + 7), ("last", 7)):
            splits = prepared(
                [talk], train_on=train_on, pack=pack, valid_path=other, recipe={"evaluate": {"sets": {"more": other}}}
            )
            assert list(splits.evaluate) == ["valid", "more"]
            held = [splits.train, *splits.evaluate.values()]
            assert [rows.report.trained_tokens for rows in held] == [count] * 3
            assert [rows.packed for rows in held] == [pack] * 3
            assert "1 of 1 documents also stand in the training rows" in splits.evaluate["valid"].report.warnings


@pytest.mark.parametrize(
    ("template", "row", "form"),
    [
        ("alpaca", {"instruction": "ab", "output": "cde"}, None),
        ("alpaca", {"instruction": "ab", "output": "cde"}, CHATML),
        ("grammar", {"input": "ab", "target": "cde"}, None),
        ("summarize", {"document": "ab", "summary": "cde"}, CHATML),
        (
            "messages",
            {"messages": [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "cde"}]},
            CHATML,
        ),
        ("text", {"text": "cde"}, None),
    ],
)
def test_b31_train_on_is_honoured_for_every_kind_of_row(
    prepared: Callable[..., Any], template: str, row: dict[str, Any], form: str | None
) -> None:
    ratios = {}
    for train_on in ("assistant", "all"):
        report = prepared([row], tiny_tokenizer(form), template=template, train_on=train_on).train.report
        ratios[train_on] = report.supervised_ratio
        trained = report.tokens - 1 - (form is not None) if train_on == "all" or template == "text" else 4
        assert report.trained_tokens == trained
    assert ratios["all"] > ratios["assistant"] or template == "text"


def test_held_out_rows_are_disjoint_and_depend_on_the_seed_alone(prepared: Callable[..., Any]) -> None:
    rows = [{"text": f"row {n}"} for n in range(40)]

    def split(seed: int) -> tuple[set[int], set[int]]:
        splits = prepared(rows, tiny_tokenizer(), template="text", valid_share=0.25, recipe={"train": {"seed": seed}})
        both = (splits.train, splits.evaluate["valid"])
        return tuple({source for row in part for source in row.sources} for part in both)

    train, valid = split(0)
    assert len(valid) == 10
    assert len(train) == 30
    assert not train & valid
    assert split(0) == (train, valid)
    assert split(1) != (train, valid)
    assert prepared(rows, tiny_tokenizer(), template="text").evaluate == {}
    tiny = prepared(rows[:2], tiny_tokenizer(), template="text", valid_share=0.01)
    assert (len(tiny.train), len(tiny.evaluate["valid"])) == (1, 1)
    with pytest.raises(DataError, match=r"cannot be taken from a single row"):
        prepared(rows[:1], tiny_tokenizer(), template="text", valid_share=0.5)


def test_evaluation_rows_are_the_first_ones(prepared: Callable[..., Any], write: Callable[..., str]) -> None:
    valid = write([{"text": f"held out {n}"} for n in range(9)], "valid.jsonl")
    splits = prepared(
        [{"text": "one"}],
        tiny_tokenizer(),
        template="text",
        pack=True,
        valid_path=valid,
        max_rows=1,
        recipe={"evaluate": {"max_rows": 4}},
    )
    held = splits.evaluate["valid"]
    assert [row.sources for row in held.documents] == [(0,), (1,), (2,), (3,)]
    assert len(held) == 1


def test_b54_an_evaluation_file_without_rows_stops(prepared: Callable[..., Any], tmp_path: Path) -> None:
    empty = tmp_path / "valid.jsonl"
    empty.write_bytes(b"")
    with pytest.raises(DataError, match=r"valid\.jsonl: the file is empty"):
        prepared([{"text": "one"}], tiny_tokenizer(), template="text", valid_path=str(empty))


def same(a: Row, b: Row) -> bool:
    return bool((a.input_ids == b.input_ids).all() and (a.labels == b.labels).all())


def test_packed_rows_hold_the_same_documents(prepared: Callable[..., Any]) -> None:
    rows = documents((9, 3, 7, 2, 4, 8, 3))
    loose = prepared(rows, tiny_tokenizer(), template="text", max_tokens=12).train
    packed = prepared(rows, tiny_tokenizer(), template="text", max_tokens=12, pack=True).train
    assert loose.documents is loose
    assert not loose.packed
    assert packed.packed
    assert all(map(same, loose, packed.documents))
    assert len(packed.documents) == 7
    assert [row.id for row in packed] == list(range(len(packed)))
    assert len(packed) == 3
    assert packed.lengths.tolist() == [len(row.input_ids) for row in packed] == [12, 12, 12]
    assert packed.trained.tolist() == [int((row.labels != IGNORED).sum()) for row in packed]
    assert packed.report.efficiency == 1.0
    assert sorted(s for row in packed for s in row.sources) == list(range(7))
    for row in packed:
        assert list(row.sources) == sorted(row.sources)
        at = 0
        for source, length in zip(row.sources, row.document_lengths, strict=True):
            assert row.input_ids[at : at + length].tolist() == loose[source].input_ids.tolist()
            at += length
    assert packed[-1].id == 2
    assert [row.id for row in packed[1:]] == [1, 2]
    with pytest.raises(IndexError):
        packed[3]


def test_fingerprints_tell_data_apart(prepared: Callable[..., Any]) -> None:
    def mark(rows: list[dict[str, Any]], **data: Any) -> str:
        held: RowSet = prepared(
            rows, data.pop("tokenizer", None) or tiny_tokenizer(), **{"template": "text", **data}
        ).train
        return held.fingerprint

    rows = documents((4, 6))
    assert mark(rows) == mark(rows)
    assert len(mark(rows)) == 64
    grammar = [{"input": "ab", "target": "cd"}]
    marks = [
        mark(rows),
        mark(rows, pack=True),
        mark(rows, max_tokens=5),
        mark(rows[::-1]),
        mark(rows, tokenizer=tiny_tokenizer(bos=True)),
        mark(grammar, template="grammar"),
        mark(grammar, template="grammar", train_on="all"),
    ]
    assert len(set(marks)) == len(marks)


def test_arrays_are_compact(prepared: Callable[..., Any]) -> None:
    row = prepared(documents((4,)), tiny_tokenizer(), template="text").train[0]
    assert row.input_ids.dtype == np.int32
    assert row.labels.dtype == np.int32


def test_b36_an_injected_system_text_is_reported(prepared: Callable[..., Any]) -> None:
    talk = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    rows = [{"messages": talk}, {"messages": [{"role": "system", "content": "Be brief."}, *talk]}]
    report = prepared(rows, tiny_tokenizer(chat_forms.DEFAULT_SYSTEM)).train.report
    found = [warning for warning in report.warnings if "You are a helpful assistant." in warning]
    assert len(found) == 1
    assert found[0].startswith("1 of 2 rows have no system message")
    assert not prepared(rows, tiny_tokenizer(CHATML)).train.report.warnings


def test_b16_a_limit_of_one_token_splits_into_nothing_and_says_so(prepared: Callable[..., Any]) -> None:
    keys = {"template": "text", "max_tokens": 1, "on_long": "split"}
    report = prepared([{"text": "ab"}, {"text": "cd"}], strict=False, **keys).train.report
    assert (report.rows_in, report.rows_kept, report.documents) == (2, 0, 0)
    assert report.dropped == {"no trainable token left after truncation": 2}
    with pytest.raises(DataError, match="2 of 2 rows have no trainable token left"):
        prepared([{"text": "ab"}, {"text": "cd"}], **keys)
