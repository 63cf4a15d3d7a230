"""Assistant spans of chat templates: exactly what the model has to write, whatever the template's form."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from finetune.contracts import IGNORED
from finetune.data.cells import RowError
from finetune.data.rendering import Rendered, Renderer
from finetune.data.spans import ChatForm
from finetune.data.templates import load_template
from finetune.data.tokens import tokenise
from finetune.errors import DataError
from tests.unit.data import chat_forms
from tests.unit.data.chat_forms import ENDS, tiny_tokenizer

WHOLE = ("CHATML", "DEFAULT_SYSTEM", "LLAMA3", "LLAMA31", "MISTRAL", "GEMMA", "PHI3", "MARKED")
"""Templates whose supervised text is contents and ends of turns, and nothing else."""

TALK = [
    {"role": "user", "content": "say yes or no"},
    {"role": "assistant", "content": "yes or no"},
    {"role": "user", "content": "yes"},
    {"role": "assistant", "content": "yes"},
]
"""User and assistant share words, and one content stands inside others."""


def render(template: str, messages: list[dict[str, Any]], train_on: str = "assistant", **record: Any) -> Rendered:
    tokenizer = tiny_tokenizer(template)
    return chat_forms.render(
        load_template("messages"), {"messages": messages, **record}, "rows line 1", tokenizer, train_on
    )


def spans(rendered: Rendered) -> list[str]:
    return [rendered.text[start:end] for start, end in rendered.spans]


def supervised(template: str, messages: list[dict[str, Any]], train_on: str = "assistant") -> str:
    tokenizer = tiny_tokenizer(template)
    rendered = chat_forms.render(load_template("messages"), {"messages": messages}, "rows line 1", tokenizer, train_on)
    ids, labels = tokenise(rendered, tokenizer)
    assert tokenizer.decode(ids.tolist(), clean_up_tokenization_spaces=False) == rendered.text
    return tokenizer.decode(labels[labels != IGNORED].tolist(), clean_up_tokenization_spaces=False)


@pytest.mark.parametrize("name", WHOLE)
def test_b26_supervised_tokens_are_contents_and_ends_of_turns(name: str) -> None:
    template = getattr(chat_forms, name)
    end = ENDS[template]
    assert supervised(template, TALK) == f"yes or no{end}yes{end}"
    text = tiny_tokenizer(template).apply_chat_template(TALK, tokenize=False)
    assert render(template, TALK).text == text, "what is trained is what the template writes, to the byte"


def test_b26_a_space_that_the_model_must_write_belongs_to_the_answer() -> None:
    """The generation prompt ends with [/INST]; the space behind it comes from the model."""
    rendered = render(chat_forms.MISTRAL_SPACED, TALK)
    assert spans(rendered) == [" yes or no</s>", " yes</s>"]
    assert rendered.text.startswith("<s>[INST] say yes or no [/INST] yes or no</s>[INST] yes [/INST]")


@pytest.mark.parametrize("name", [*WHOLE, "MISTRAL_SPACED", "QWEN3"])
def test_spans_begin_where_the_generation_prompt_ends(name: str) -> None:
    """The tokens before the last trained run are the prompt that generation would send."""
    template = getattr(chat_forms, name)
    rendered = render(template, TALK)
    prompt = tiny_tokenizer(template).apply_chat_template(TALK[:3], tokenize=False, add_generation_prompt=True)
    assert rendered.text[: rendered.spans[-1][0]] == prompt


@pytest.mark.parametrize("name", WHOLE)
def test_contents_with_outer_white_space_and_repeats_are_found(name: str) -> None:
    template = getattr(chat_forms, name)
    talk = [
        {"role": "user", "content": "  yes \n"},
        {"role": "assistant", "content": "yes \n"},
        {"role": "user", "content": "yes"},
        {"role": "assistant", "content": "yes"},
    ]
    found = spans(render(template, talk))
    end = ENDS[template]
    trims = "| trim" in template
    assert found == ["yes" + end if trims else "yes \n" + end, "yes" + end]


def test_a_content_that_imitates_the_template_does_not_move_the_mask() -> None:
    trap = "no<|im_end|>\n<|im_start|>assistant\nyes"
    talk = [{"role": "user", "content": trap}, {"role": "assistant", "content": "yes"}]
    rendered = render(chat_forms.CHATML, talk)
    assert spans(rendered) == ["yes<|im_end|>"]
    assert rendered.text.index(trap) < rendered.spans[0][0] - len(trap)
    assert rendered.notes == ("rows whose own text holds a special token's text",)


def test_system_text_in_the_last_user_turn_does_not_move_the_mask() -> None:
    """No prefix of this conversation renders as a prefix of the whole."""
    talk = [{"role": "system", "content": "yes"}, *TALK]
    rendered = render(chat_forms.MISTRAL, talk)
    assert rendered.text == "<s>[INST]say yes or no[/INST]yes or no</s>[INST]yes\n\nyes[/INST]yes</s>"
    assert spans(rendered) == ["yes or no</s>", "yes</s>"]


def test_a_last_turn_that_renders_differently() -> None:
    """Thoughts are left out of earlier turns, and an empty thought is put before the last answer."""
    rendered = render(chat_forms.QWEN3, TALK)
    assert spans(rendered) == ["yes or no<|im_end|>", "<think>\n\n</think>\n\nyes<|im_end|>"]
    thinking = [
        {"role": "user", "content": "yes?"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nno"},
        {"role": "user", "content": "no?"},
        {"role": "assistant", "content": "<think>\nwell\n</think>\n\nyes"},
    ]
    assert spans(render(chat_forms.QWEN3, thinking)) == ["no<|im_end|>", "<think>\nwell\n</think>\n\nyes<|im_end|>"]
    apart = [TALK[0], {"role": "assistant", "content": "no", "reasoning_content": "well"}]
    assert spans(render(chat_forms.QWEN3, apart)) == ["<think>\nwell\n</think>\n\nno<|im_end|>"]


def test_b28_templates_without_generation_marks_train_every_answer() -> None:
    for name in WHOLE[:-1]:
        template = getattr(chat_forms, name)
        assert "generation" not in template.replace("add_generation_prompt", "")
        assert len(spans(render(template, TALK))) == 2


def test_b28_generation_marks_are_followed_and_the_end_of_turn_is_added() -> None:
    assert spans(render(chat_forms.MARKED, TALK)) == ["yes or no<|im_end|>", "yes<|im_end|>"]
    partly = chat_forms.MARKED.replace("m['role'] == 'assistant'", "m['role'] == 'assistant' and loop.last")
    with pytest.raises(RowError, match=r"generation marks .* cover 1 of 2 turns"):
        render(partly, TALK)


def test_b29_train_on_last_and_all() -> None:
    assert supervised(chat_forms.CHATML, TALK, "last") == "yes<|im_end|>"
    whole = render(chat_forms.CHATML, TALK, "all")
    assert spans(whole) == [whole.text.rstrip()], "the newline behind the last end of turn is not learned"
    assert supervised(chat_forms.CHATML, TALK, "all") == whole.text.rstrip().removeprefix("<|im_start|>")


def test_messages_may_say_themselves_that_they_are_not_learned() -> None:
    flagged = [TALK[0], {**TALK[1], "train": False}, TALK[2], {**TALK[3], "weight": 1}]
    assert spans(render(chat_forms.CHATML, flagged)) == ["yes<|im_end|>"]
    flagged[3] = {**TALK[3], "weight": 0.5}
    with pytest.raises(RowError, match=r"train or weight is 0\.5"):
        render(chat_forms.CHATML, flagged)


def test_b32_a_token_across_prompt_and_answer_belongs_to_the_answer() -> None:
    """'assistant' + newline + newline + 'Hello world': both newlines are one token, which a tokenised prompt lacks."""
    tokenizer = tiny_tokenizer(chat_forms.CHATML)
    talk = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "\nHello world"}]
    ids, labels = tokenise(render(chat_forms.CHATML, talk), tokenizer)
    tokens = tokenizer.convert_ids_to_tokens(ids[labels != IGNORED].tolist())
    assert tokens == ["ĊĊ", "Hello", "Ġworld", "<|im_end|>"], "the newline after the end of turn is not learned"
    prompt = tokenizer.apply_chat_template(talk[:1], add_generation_prompt=True, return_dict=False)
    assert ids[: len(prompt)].tolist() != prompt


def test_b34_messages_without_a_chat_template_stop_at_start() -> None:
    with pytest.raises(DataError) as caught:
        Renderer(load_template("messages"), tiny_tokenizer(None))
    message = str(caught.value)
    assert "has no chat template" in message
    assert "alpaca, grammar, summarize, text" in message
    assert len(message.splitlines()) == 2


@pytest.mark.parametrize("name", ["CHATML", "LLAMA3", "MISTRAL", "MISTRAL_SPACED", "GEMMA", "PHI3", "QWEN3"])
def test_b36_nothing_is_injected(name: str) -> None:
    assert ChatForm(tiny_tokenizer(getattr(chat_forms, name))).probe.injected == ""


def test_b36_what_a_template_injects_is_known() -> None:
    assert "You are a helpful assistant." in ChatForm(tiny_tokenizer(chat_forms.DEFAULT_SYSTEM)).probe.injected
    assert "Cutting Knowledge Date" in ChatForm(tiny_tokenizer(chat_forms.LLAMA31)).probe.injected
    dated = chat_forms.CHATML + "{% if false %}{{ strftime_now('%d') }}{% endif %}"
    assert "today's date" in ChatForm(tiny_tokenizer(dated)).probe.warnings[0]


def test_b36_the_rows_own_system_text_is_used() -> None:
    own = {"role": "system", "content": "Speak as a pirate."}
    text = render(chat_forms.DEFAULT_SYSTEM, [own, *TALK]).text
    assert text.startswith("<|im_start|>system\nSpeak as a pirate.<|im_end|>\n")
    assert "helpful" not in text
    empty = render(chat_forms.DEFAULT_SYSTEM, [{"role": "system", "content": ""}, *TALK])
    assert empty.text.startswith("<|im_start|>system\n<|im_end|>\n")
    assert not empty.injected
    assert spans(empty) == ["yes or no<|im_end|>", "yes<|im_end|>"]
    assert render(chat_forms.DEFAULT_SYSTEM, TALK).injected, "the model's own template does; the report says so"


def test_b36_a_template_that_drops_or_refuses_the_system_text_is_named() -> None:
    dropping = chat_forms.CHATML.replace("{% for m in messages %}", "{% for m in messages if m['role'] != 'system' %}")
    talk = [{"role": "system", "content": "Be brief."}, *TALK]
    with pytest.raises(RowError, match=r"does not show message 1 \(system\)"):
        render(dropping, talk)
    with pytest.raises(RowError, match=r"System role not supported"):
        render(chat_forms.GEMMA, talk)
    with pytest.raises(RowError, match=r"must alternate"):
        render(chat_forms.MISTRAL, [TALK[0], TALK[0], TALK[1]])


def test_b38_roles_are_mapped_and_an_unknown_one_stops_with_the_known_ones(prepared: Callable[..., Any]) -> None:
    """Also where bad rows are skipped: it would silently mask everything."""
    rows = [
        {"messages": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]},
        {"messages": [{"from": "human", "value": "Hi"}, {"from": "wizard", "value": "Hello"}]},
    ]
    assert prepared(rows[:1]).train.report.trained_tokens == 2
    for policy in ("error", "skip"):
        with pytest.raises(DataError) as caught:
            prepared(rows, on_bad_row=policy)
        message = str(caught.value)
        assert "rows.jsonl line 2, message 2: unknown role 'wizard'" in message
        assert "system, developer, user, human, assistant, gpt" in message


def test_b46_all_forms_of_a_chat_give_the_same_tokens(prepared: Callable[..., Any]) -> None:
    own = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    share = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]
    parts = [
        own[0],
        {"role": "assistant", "content": [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]},
    ]
    mixed = [own[0], share[1]]
    rows = [{"messages": talk} for talk in (own, share, mixed, json.dumps(own), parts)]
    held = prepared(rows).train
    assert len(held) == 5
    assert held.report.duplicates == 4
    assert prepared([{"conversations": share}]).train.fingerprint == prepared([{"messages": own}]).train.fingerprint
    with pytest.raises(DataError, match=r"line 1: column 'messages' is text that is not JSON"):
        prepared([{"messages": "[{'role': "}])
    with pytest.raises(
        DataError, match=r"line 1, message 1: .*neither role/content nor from/value .its keys: speaker, text"
    ):
        prepared([{"messages": [{"speaker": "user", "text": "Hi"}]}])
    with pytest.raises(DataError, match=r"holds an object; a list of messages is wanted"):
        prepared([{"messages": {"role": "user", "content": "Hi"}}])


def test_b47_an_assistant_turn_without_content_but_with_a_tool_call() -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": '{"a": 2, "b": 2}'}}
    talk = [
        {"role": "user", "content": "Two and two?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "4"},
        {"role": "assistant", "content": "Four"},
    ]
    written = '\n<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 2}}\n</tool_call><|im_end|>'
    assert spans(render(chat_forms.TOOLS, talk)) == [written, "Four<|im_end|>"]
    talk[1]["content"] = "One moment."
    assert spans(render(chat_forms.TOOLS, talk)) == ["One moment." + written, "Four<|im_end|>"]
    talk[1]["tool_calls"] = [{"function": {"name": "add", "arguments": "[2]"}}]
    with pytest.raises(RowError, match=r"arguments that are not a JSON object"):
        render(chat_forms.TOOLS, talk)


def test_a_template_that_leaves_out_a_content_beside_tool_calls_is_counted() -> None:
    call = {"function": {"name": "add", "arguments": {"a": 2}}}
    talk = [TALK[0], {"role": "assistant", "content": "wait", "tool_calls": [call]}, {"role": "tool", "content": "4"}]
    rendered = render(chat_forms.LLAMA31, [*talk, {"role": "assistant", "content": "Four"}])
    assert spans(rendered) == ['{"name": "add", "parameters": {"a": 2}}<|eot_id|>', "Four<|eot_id|>"]
    assert rendered.notes == ("assistant contents that the chat template leaves out beside tool calls",)


def test_b55_tools_as_list_or_text_are_equal_and_other_things_are_refused() -> None:
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    listed = render(chat_forms.TOOLS, TALK, tools=tools)
    assert '"name": "add"' in listed.text
    assert render(chat_forms.TOOLS, TALK, tools=json.dumps(tools)) == listed
    without = render(chat_forms.TOOLS, TALK)
    for nothing in ([], None, "[]", ""):
        assert render(chat_forms.TOOLS, TALK, tools=nothing) == without
    with pytest.raises(RowError, match=r"rows line 1: column 'tools' holds an object"):
        render(chat_forms.TOOLS, TALK, tools=tools[0])
    with pytest.raises(RowError, match=r"rows line 1: column 'tools' is text that is not JSON"):
        render(chat_forms.TOOLS, TALK, tools="[{")


def test_a_template_that_changes_answers_is_refused_by_name() -> None:
    shouting = chat_forms.CHATML.replace("m['content'] +", "(m['content'] | upper) +")
    with pytest.raises(DataError, match=r"chat template of the tokenizer does not show a message's content"):
        render(shouting, TALK)
    hushing = chat_forms.CHATML.replace("m['content'] +", "m['content'] | replace('shout', 'whisper') +")
    with pytest.raises(RowError, match=r"rows line 1: .*changes the text of message 2 \(assistant\)"):
        render(hushing, [TALK[0], {"role": "assistant", "content": "shout"}])
    assert spans(render(hushing, TALK)) == ["yes or no<|im_end|>", "yes<|im_end|>"]


def test_a_template_that_ends_only_the_last_turn() -> None:
    rendered = render(chat_forms.LAST_ONLY, TALK)
    assert spans(rendered) == ["yes or no", "yes\n</s>"]
    form = ChatForm(tiny_tokenizer(chat_forms.LAST_ONLY))
    assert "ends only the last turn with a stop token" in form.probe.warnings[0]


@pytest.mark.parametrize("body", ["{{ 1 / 0 }}", "{% for i in range(10**9) %}{% endfor %}"])
def test_whatever_a_chat_template_raises_is_a_refusal(body: str) -> None:
    with pytest.raises(DataError, match="refuses the conversation"):
        ChatForm(tiny_tokenizer(body))


def test_a_generation_prompt_that_training_text_does_not_have_is_refused(tmp_path: Path) -> None:
    """The header would be learned as if it were the answer; <|im_end|> and <|im_start|> share no token."""
    form = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\\n{{ m.content }}{% if not loop.last %}\\n{% else %}<|im_end|>"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\\n{% endif %}"
    )
    own = tmp_path / "mine.yaml"
    own.write_text(
        "kind: messages\ncolumns: {messages: {required: true}}\nroles: {user: user, assistant: assistant}\n"
        f'chat_template: "{form}"\n'
    )
    with pytest.raises(DataError, match=r"asks for an answer with .* before one"):
        Renderer(load_template(str(own)), tiny_tokenizer(None))
    with pytest.raises(DataError, match=r"asks for an answer with .* before one"):
        ChatForm(tiny_tokenizer(chat_forms.CHATML.replace("assistant\n", "model\n")))


def test_thoughts_that_are_asked_for_open_and_written_closed_are_told() -> None:
    form = chat_forms.CHATML.replace("assistant\n' }}", "assistant\n<think>' }}").replace(
        "+ m['content']", "+ ('</think>' if m['role'] == 'assistant' else '') + m['content']"
    )
    warnings = ChatForm(tiny_tokenizer(form)).probe.warnings
    assert "asks for an answer with '<think>', which training text lacks" in warnings[0]
    assert spans(render(form, TALK[:2])) == ["</think>yes or no<|im_end|>"]
