"""What a chat template leaves out of a row is refused or counted, and an answer of nothing is no answer."""

from __future__ import annotations

from typing import Any

import pytest

from finetune.data.cells import RowError
from finetune.data.rendering import SPECIAL_TEXT, Rendered
from finetune.data.shown import DROPPED_REASONING
from finetune.data.templates import load_template
from tests.unit.data import chat_forms
from tests.unit.data.chat_forms import CHATML, TOOLS, tiny_tokenizer

ASKED = {"role": "user", "content": "what is the time?"}


def row(template: str, record: dict[str, Any], form: str | None = None) -> Rendered:
    return chat_forms.render(load_template(template), record, "rows line 1", tiny_tokenizer(form))


def called(arguments: Any, name: str = "time") -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def calling(*calls: dict[str, Any]) -> list[dict[str, Any]]:
    said: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": list(calls)}
    return [ASKED, said, {"role": "tool", "content": "5"}, {"role": "assistant", "content": "It is 5"}]


def learned(rendered: Rendered) -> list[str]:
    return [rendered.text[start:end] for start, end in rendered.spans]


@pytest.mark.parametrize("template", ["chatml", "messages", "sharegpt", "llama3"])
def test_a_call_that_is_not_shown_is_refused_though_the_user_names_the_tool(template: str) -> None:
    form = CHATML if template in ("messages", "sharegpt") else None
    column = "conversations" if template == "sharegpt" else "messages"
    with pytest.raises(RowError, match="does not show the call of the tool 'time'"):
        row(template, {column: calling(called({"tz": "x"}))}, form)


def test_arguments_and_tools_and_second_calls_that_are_not_shown_are_refused() -> None:
    named = TOOLS.replace("(c.function | tojson)", "c.function.name")
    with pytest.raises(RowError, match="does not show the arguments of the call of the tool 'time'"):
        row("messages", {"messages": calling(called({"tz": "x"}))}, named)
    first = TOOLS.replace("in m.tool_calls %}", "in m.tool_calls[:1] %}")
    with pytest.raises(RowError, match="does not show the call of the tool 'time'"):
        row("messages", {"messages": calling(called({"tz": "x"}), called({"tz": "x"}))}, first)
    tools = [{"type": "function", "function": {"name": "time", "parameters": {}}}]
    talk = [ASKED, {"role": "assistant", "content": "no time"}]
    with pytest.raises(RowError, match="does not show the tool 'time'"):
        row("messages", {"messages": talk, "tools": tools}, CHATML)


@pytest.mark.parametrize(("template", "form"), [("qwen", None), ("messages", TOOLS)])
def test_a_stop_token_inside_arguments_does_not_end_the_turn(template: str, form: str | None) -> None:
    talk = calling(called({"a": "x<|im_end|>y"}), called({"b<|im_end|>": ["<|im_end|>"]}))
    rendered = row(template, {"messages": talk}, form)
    first, last = learned(rendered)
    assert first.endswith('{"b<|im_end|>": ["<|im_end|>"]}}\n</tool_call><|im_end|>')
    assert '{"a": "x<|im_end|>y"}' in first
    assert last == "It is 5<|im_end|>"
    assert rendered.notes == (SPECIAL_TEXT,)


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
@pytest.mark.parametrize(("template", "form"), [("qwen", None), ("messages", CHATML)])
def test_reasoning_that_is_not_shown_is_counted(template: str, form: str | None, key: str) -> None:
    rendered = row(template, {"messages": [ASKED, {"role": "assistant", "content": "A", key: "time"}]}, form)
    assert learned(rendered) == ["A<|im_end|>"]
    assert rendered.notes == (DROPPED_REASONING,)


def test_reasoning_that_is_shown_is_not_counted() -> None:
    talk = [ASKED, {"role": "assistant", "content": "A", "reasoning_content": "why"}]
    rendered = row("messages", {"messages": talk}, chat_forms.QWEN3)
    assert learned(rendered) == ["<think>\nwhy\n</think>\n\nA<|im_end|>"]
    assert rendered.notes == ()


def test_a_second_content_and_a_second_list_of_messages_are_counted() -> None:
    talk = [ASKED, {"role": "assistant", "content": "A", "from": "gpt", "value": "B"}]
    rendered = row("messages", {"messages": talk}, CHATML)
    assert learned(rendered) == ["A<|im_end|>"]
    assert rendered.notes[0].startswith("messages with a content and a value that differ")
    talk[1]["value"] = "A"
    assert row("messages", {"messages": talk}, CHATML).notes == ()
    both = row("messages", {"messages": talk, "conversations": talk[:1]}, CHATML)
    assert both.notes == ("rows with both 'messages' and 'conversations' ('messages' is taken)",)


def test_an_answer_that_is_only_the_stop_token_is_empty() -> None:
    for answer in ("<|im_end|>", " <|im_end|>\n<|im_end|> ", "</s>"):
        with pytest.raises(RowError, match="rows line 1, message 2: the answer is empty"):
            row("messages", {"messages": [ASKED, {"role": "assistant", "content": answer}]}, CHATML)
    with pytest.raises(RowError, match="the answer is empty"):
        row("alpaca", {"instruction": "Q", "output": "<|im_end|>"}, CHATML)
    with pytest.raises(RowError, match="rows line 1: the answer is empty"):
        row("alpaca", {"instruction": "Q", "output": " </s>"})
    with pytest.raises(RowError, match="rows line 1: the text is empty"):
        row("text", {"text": "</s>"})
    assert learned(row("text", {"text": "a</s>"})) == ["a</s>"]
