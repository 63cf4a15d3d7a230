"""Chat templates as they are published: the mask covers what the model writes, its end once, and no begin token twice."""

from __future__ import annotations

from typing import Any

import pytest

from finetune.contracts import IGNORED
from finetune.data.cells import RowError
from finetune.data.spans import ChatForm
from finetune.data.templates import load_template
from finetune.data.tokens import tokenise
from tests.unit.data import published_forms
from tests.unit.data.chat_forms import CHATML, render, tiny_tokenizer

TALK = [
    {"role": "user", "content": "yes?"},
    {"role": "assistant", "content": "no, yes"},
    {"role": "user", "content": "no?"},
    {"role": "assistant", "content": "yes"},
]
SYSTEM = {"role": "system", "content": "Be brief."}
FORMS = {
    "LLAMA_31": ("<|eot_id|>", ["no, yes<|eot_id|>", "yes<|eot_id|>"]),
    "QWEN_25": ("<|im_end|>", ["no, yes<|im_end|>", "yes<|im_end|>"]),
    "QWEN_3": ("<|im_end|>", ["no, yes<|im_end|>", "<think>\n\n</think>\n\nyes<|im_end|>"]),
    "GEMMA_3": ("<end_of_turn>", ["no, yes<end_of_turn>", "yes<end_of_turn>"]),
    "MISTRAL_V1": ("</s>", [" no, yes</s>", " yes</s>"]),
}
"""Form: its end of turn, and what two answers train. Qwen 3 puts an empty thought before the last answer."""


def written(name: str, messages: list[dict[str, Any]], **record: Any) -> tuple[Any, Any, Any]:
    """The rendered row with its ids and labels; the tokenizer puts a begin token before every text by itself."""
    tokenizer = tiny_tokenizer(getattr(published_forms, name), bos=True, pad="</s>")
    rendered = render(load_template("messages"), {"messages": messages, **record}, "rows line 1", tokenizer)
    return rendered, *tokenise(rendered, tokenizer)


def trained(rendered: Any) -> list[str]:
    return [rendered.text[start:end] for start, end in rendered.spans]


@pytest.mark.parametrize("system", [[], [SYSTEM]], ids=["bare", "system"])
@pytest.mark.parametrize("name", FORMS)
def test_b28_published_forms_train_answers_and_their_ends(name: str, system: list[dict[str, Any]]) -> None:
    end, answers = FORMS[name]
    rendered, _, labels = written(name, [*system, *TALK])
    tokenizer = tiny_tokenizer(getattr(published_forms, name), bos=True)
    assert "generation %}" not in tokenizer.chat_template
    assert rendered.text == tokenizer.apply_chat_template([*system, *TALK], tokenize=False)
    assert trained(rendered) == answers
    decoded = tokenizer.decode(labels[labels != IGNORED].tolist(), clean_up_tokenization_spaces=False)
    assert decoded == "".join(answers)
    stop = tokenizer.convert_tokens_to_ids(end)
    assert int((labels == stop).sum()) == 2, "each answer's end is trained once, and no user's"


@pytest.mark.parametrize("name", ["LLAMA_31", "GEMMA_3", "MISTRAL_V1"])
def test_b22_published_forms_begin_once(name: str) -> None:
    _, ids, _ = written(name, TALK)
    begin = tiny_tokenizer().convert_tokens_to_ids("<s>")
    assert ids[0] == begin
    assert int((ids == begin).sum()) == 1


def test_b17_a_pad_token_that_is_the_end_token_is_trained_all_the_same() -> None:
    _, _, labels = written("MISTRAL_V1", TALK)
    end = tiny_tokenizer().convert_tokens_to_ids("</s>")
    assert int((labels == end).sum()) == 2


def test_b36_default_texts_are_reported_and_gone_where_the_row_has_its_own() -> None:
    qwen = ChatForm(tiny_tokenizer(published_forms.QWEN_25)).probe.injected
    assert "You are Qwen, created by Alibaba Cloud." in qwen
    assert "Today Date: 26 Jul 2024" in ChatForm(tiny_tokenizer(published_forms.LLAMA_31)).probe.injected
    assert written("QWEN_25", TALK)[0].injected
    own = written("QWEN_25", [SYSTEM, *TALK])[0]
    assert own.text.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n")
    assert not own.injected
    empty = written("QWEN_25", [{**SYSTEM, "content": ""}, *TALK])[0]
    assert empty.text.startswith("<|im_start|>system\n<|im_end|>\n")
    for name in ("QWEN_3", "GEMMA_3", "MISTRAL_V1"):
        assert ChatForm(tiny_tokenizer(getattr(published_forms, name))).probe.injected == ""


def test_b36_gemma_merges_the_system_text_into_the_first_user_turn() -> None:
    rendered, _, _ = written("GEMMA_3", [SYSTEM, *TALK])
    assert rendered.text.startswith("<s><start_of_turn>user\nBe brief.\n\nyes?<end_of_turn>\n<start_of_turn>model\n")
    with pytest.raises(RowError, match="must alternate"):
        written("GEMMA_3", [TALK[0], *TALK])


def test_b26_qwen_3_drops_the_thoughts_of_earlier_turns() -> None:
    talk = [
        TALK[0],
        {"role": "assistant", "content": "<think>\nyes or no\n</think>\n\nno"},
        TALK[2],
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nyes"},
    ]
    rendered, _, _ = written("QWEN_3", talk)
    assert trained(rendered) == ["no<|im_end|>", "<think>\nhm\n</think>\n\nyes<|im_end|>"]
    assert "yes or no" not in rendered.text
    apart = [*talk[:3], {"role": "assistant", "content": "yes", "reasoning_content": "hm"}]
    assert trained(written("QWEN_3", apart)[0]) == trained(rendered)


CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]


def test_b55_tool_calls_are_trained_and_tool_results_are_not() -> None:
    talk = [TALK[0], {"role": "assistant", "tool_calls": [CALL]}, {"role": "tool", "content": "4"}, TALK[3]]
    rendered, _, _ = written("LLAMA_31", talk, tools=TOOLS)
    assert trained(rendered) == ['{"name": "add", "parameters": {"a": 2}}<|eot_id|>', "yes<|eot_id|>"]
    rendered, _, _ = written("QWEN_25", talk)
    assert trained(rendered)[0].strip() == (
        '<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call><|im_end|>'
    )
    assert trained(rendered)[1] == "yes<|im_end|>"


def test_b55_tools_or_calls_that_a_template_leaves_out_are_refused() -> None:
    """Else the model learns to call what it was never shown, or to say nothing at all."""
    with pytest.raises(RowError, match="does not show the tool 'add'"):
        written("GEMMA_3", TALK, tools=TOOLS)
    tokenizer = tiny_tokenizer(CHATML)
    talk = [TALK[0], {"role": "assistant", "content": "", "tool_calls": [CALL]}]
    with pytest.raises(RowError, match="does not show the call of the tool 'add'"):
        render(load_template("messages"), {"messages": talk}, "rows line 1", tokenizer)
