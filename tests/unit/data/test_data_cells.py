"""Cells that are no text and no JSON, keys given twice inside JSON text, and the words in which rows are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from finetune.config.load import load_recipe
from finetune.data.cells import RowError, json_cell, kind_of, text_cell
from finetune.data.rendering import Renderer
from finetune.data.templates import load_template
from finetune.errors import ConfigError, DataError
from tests.unit.data import chat_forms
from tests.unit.data.chat_forms import CHATML, TOOLS, tiny_tokenizer

ASKED = {"role": "user", "content": "Q"}


def row(record: dict[str, Any], form: str = CHATML) -> Any:
    return chat_forms.render(load_template("messages"), record, "rows line 1", tiny_tokenizer(form))


@pytest.mark.parametrize(
    "text",
    [
        '[{"role": "user", "content": "Q"}, {"role": "assistant", "content": "first", "content": "second"}]',
        '[{"role": "user", "content": "Q", "content": "Q"}]',
    ],
)
def test_a_key_given_twice_inside_json_text_is_refused(text: str) -> None:
    with pytest.raises(
        RowError, match="rows line 1: column 'messages' is JSON text in which the key 'content' is given"
    ):
        row({"messages": text})


def test_a_key_given_twice_in_arguments_and_tools_is_refused() -> None:
    twice = '{"a": {"b": 1, "b": 2}}'
    call = {"function": {"name": "add", "arguments": twice}}
    with pytest.raises(RowError, match="column 'arguments' is JSON text in which the key 'b' is given twice") as caught:
        row({"messages": [ASKED, {"role": "assistant", "content": "", "tool_calls": [call]}]}, TOOLS)
    assert caught.value.skippable
    with pytest.raises(RowError, match="column 'tools' is JSON text in which the key 'b' is given twice"):
        row({"messages": [ASKED, {"role": "assistant", "content": "A"}], "tools": f"[{twice}]"}, TOOLS)
    assert json_cell('{"a": 1, "b": {"a": 2}}', "x", "") == {"a": 1, "b": {"a": 2}}


@pytest.mark.parametrize("number", ["1e400", "-1e400", "Infinity", "-Infinity"])
def test_an_infinite_number_is_no_text(number: str) -> None:
    with pytest.raises(RowError, match=r"rows line 1: column 'a' holds -?inf"):
        text_cell(json.loads(number), "a", "rows line 1", set())
    assert text_cell(json.loads("NaN"), "a", "", set()) == ""
    assert text_cell(1.5, "a", "", set()) == "1.5"


@pytest.mark.parametrize("number", ["NaN", "1e400", "-Infinity"])
@pytest.mark.parametrize("as_text", [True, False])
def test_numbers_that_json_does_not_have_are_refused_in_calls_and_tools(number: str, as_text: bool) -> None:
    text = f'{{"a": [{{"b": {number}}}]}}'
    held = text if as_text else json.loads(text)
    call = {"function": {"name": "add", "arguments": held}}
    with pytest.raises(RowError, match="tool call arguments hold a number that JSON does not have"):
        row({"messages": [ASKED, {"role": "assistant", "content": "", "tool_calls": [call]}]}, TOOLS)
    tools = [{"type": "function", "function": {"name": "add", "parameters": json.loads(text)}}]
    with pytest.raises(RowError, match="rows line 1: tools hold a number that JSON does not have"):
        row({"messages": [ASKED, {"role": "assistant", "content": "A"}], "tools": tools}, TOOLS)


def test_a_part_of_another_type_is_no_text_whatever_text_it_brings() -> None:
    for part in ({"type": "image", "text": "p1"}, {"type": 1, "text": "p1"}, {"type": "text"}):
        with pytest.raises(RowError, match="message 1: 'content' has a part that is not text"):
            row({"messages": [{"role": "user", "content": [part]}, {"role": "assistant", "content": "A"}]})
    parts = [{"type": "text", "text": "a"}, {"text": "b"}, "c", {"type": "input_text", "text": "d"}]
    rendered = row({"messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": "A"}]})
    assert "abcd<|im_end|>" in rendered.text


def test_a_column_that_is_taken_twice_is_told(prepared: Callable[..., Any]) -> None:
    template = load_template("alpaca").mapped({"output": "instruction"})
    warning = "data.columns: the column 'instruction' is taken as instruction and as output"
    assert Renderer(template, tiny_tokenizer(CHATML)).warnings() == [warning]
    both = load_template("alpaca").mapped({"output": "x", "instruction": "x"})
    assert both.doubled() == ["data.columns: the column 'x' is taken as instruction and as output"]
    assert load_template("alpaca").mapped({"output": "x", "instruction": "y"}).doubled() == []
    held = prepared([{"instruction": "a"}], template="alpaca", columns={"output": "instruction"}).train
    assert warning in held.report.warnings


def test_values_are_named_in_words() -> None:
    values = ("a", True, 1, 1.5, {}, [], (), b"a", 1j)
    assert [kind_of(value) for value in values] == [
        "a text", "a boolean", "a number", "a number", "an object", "a list", "a list", "bytes",
        "a value of the kind complex",
    ]  # fmt: skip


def test_a_role_that_is_no_name_is_a_fault_of_its_row() -> None:
    with pytest.raises(RowError, match="message 1: the role is a list; a name is wanted") as caught:
        row({"messages": [{"role": ["x"], "content": "Q"}]})
    assert caught.value.skippable
    assert "data.roles" not in str(caught.value)


def test_a_mapped_column_that_is_missing_is_not_told_to_be_mapped(prepared: Callable[..., Any]) -> None:
    with pytest.raises(
        DataError, match=r"data\.columns\.instruction says 'Instruction': give one of the columns found"
    ):
        prepared([{"instruction": "a", "output": "b"}], template="alpaca", columns={"instruction": "Instruction"})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("data.weights.a=0", "data.weights.a: '0' is not a number above 0\n    -> give a number above 0"),
        ("data.weights.a=x", "data.weights.a: 'x' is not a number above 0\n    -> give a number above 0"),
        ("data.roles.x=", "data.roles.x: no value is given\n    -> give text"),
    ],
)
def test_an_entry_of_a_section_is_told_what_the_entry_wants(change: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_recipe("quickstart", [change])
    assert message in str(caught.value)
