"""End, begin and pad tokens in the labels, and labels by character offsets."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from finetune.contracts import IGNORED, Row
from finetune.data.loader import collate
from finetune.data.rendering import Rendered, begin_text
from finetune.data.templates import load_template
from finetune.data.tokens import _learned, tokenise
from finetune.errors import DataError
from tests.unit.data import chat_forms
from tests.unit.data.chat_forms import render, tiny_tokenizer

ROW = {"input": "a", "target": "b"}


def tokens(
    tokenizer: Any, template: str, record: dict[str, Any], train_on: str = "assistant"
) -> tuple[list[str], list[str]]:
    """All tokens, and the trained ones."""
    ids, labels = tokenise(render(load_template(template), record, "row", tokenizer, train_on), tokenizer)
    kept = labels[labels != IGNORED].tolist()
    return tokenizer.convert_ids_to_tokens(ids.tolist()), tokenizer.convert_ids_to_tokens(kept)


@pytest.mark.parametrize("pad", [None, "</s>", "<pad>"])
def test_b17_the_end_token_is_trained_though_padding_is_the_same(prepared: Callable[..., Any], pad: str | None) -> None:
    tokenizer = tiny_tokenizer(bos=True, pad=pad)
    end = tokenizer.eos_token_id
    held = prepared([{"text": "ab"}, {"text": "a"}], tokenizer, template="text")
    batch = collate(held.train[:], end)
    a, b = tokenizer.convert_tokens_to_ids(["a", "b"])
    begin = tokenizer.bos_token_id
    assert batch.input_ids.tolist() == [[begin, a, b, end], [begin, a, end, end]]
    assert batch.labels.tolist() == [[IGNORED, a, b, end], [IGNORED, a, end, IGNORED]]


def test_b18_each_path_ends_with_exactly_one_trained_end_token() -> None:
    plain, chat = tiny_tokenizer(), tiny_tokenizer(chat_forms.CHATML)
    done = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b<|im_end|>"}]}
    ways = [
        (plain, "grammar", ROW, "</s>"),
        (plain, "grammar", {**ROW, "target": "b</s>"}, "</s>"),
        (plain, "grammar", {**ROW, "target": "b </s>\n</s>"}, "</s>"),
        (plain, "alpaca", {"instruction": "a", "output": "b"}, "</s>"),
        (plain, "summarize", {"document": "a", "summary": "b</s>"}, "</s>"),
        (plain, "text", {"text": "a b"}, "</s>"),
        (plain, "text", {"text": "a b</s>"}, "</s>"),
        (chat, "grammar", ROW, "<|im_end|>"),
        (chat, "grammar", {**ROW, "target": "b<|im_end|>\n"}, "<|im_end|>"),
        (chat, "messages", done, "<|im_end|>"),
    ]
    for tokenizer, template, record, end in ways:
        everything, trained = tokens(tokenizer, template, record)
        assert (trained[-1], trained.count(end)) == (end, 1), (template, record)
        assert everything.count("</s>") <= 1
    rendered = render(load_template("grammar"), {**ROW, "target": "b</s>"}, "row", plain)
    assert rendered.notes == (
        "answers that already ended with the stop token (not doubled)",
        "rows whose own text holds a special token's text",
    )


def test_b18_a_truncated_row_has_no_end_token(prepared: Callable[..., Any]) -> None:
    tokenizer = tiny_tokenizer()
    rows = [{"text": "abcdefgh"}, {"text": "ab"}]
    train = prepared(rows, tokenizer, template="text", max_tokens=8).train
    assert tokenizer.decode(train[0].input_ids.tolist()) == "abcdefgh"
    assert train[0].labels[-1] == train[0].input_ids[-1]
    assert tokenizer.decode(train[1].input_ids.tolist()) == "ab</s>"
    assert (train.report.truncated, train.report.stopped_documents) == (1, 1)


@pytest.mark.parametrize("name", ["LLAMA3", "MISTRAL", "GEMMA"])
def test_b22_one_begin_token_where_template_and_tokenizer_both_add_it(name: str) -> None:
    tokenizer = tiny_tokenizer(getattr(chat_forms, name), bos=True)
    talk = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    everything, trained = tokens(tokenizer, "messages", talk)
    assert everything[0] == "<s>"
    assert everything.count("<s>") == 1
    assert "<s>" not in trained


def test_b22_plain_text_gets_what_the_tokenizer_itself_adds() -> None:
    adding, bare = tiny_tokenizer(bos=True), tiny_tokenizer()
    assert (begin_text(adding), begin_text(bare)) == ("<s>", "")
    for template, record in (("grammar", ROW), ("text", {"text": "ab"}), ("text", {"text": "<s>ab"})):
        assert tokens(adding, template, record)[0].count("<s>") == 1
    assert tokens(bare, "grammar", ROW)[0].count("<s>") == 0
    assert tokens(adding, "text", {"text": "ab"}) == (["<s>", "a", "b", "</s>"], ["a", "b", "</s>"])


def test_the_first_token_is_never_trained() -> None:
    assert tokens(tiny_tokenizer(), "text", {"text": "ab"}) == (["a", "b", "</s>"], ["b", "</s>"])
    assert tokens(tiny_tokenizer(), "grammar", ROW, "all")[1][0] == "#"


def test_b32_plain_prompt_and_answer() -> None:
    tokenizer = tiny_tokenizer()
    rendered = Rendered("Hi\n\nHello world</s>", ((3, 19),))
    ids, labels = tokenise(rendered, tokenizer)
    assert tokenizer.convert_ids_to_tokens(ids.tolist()) == ["H", "i", "ĊĊ", "Hello", "Ġworld", "</s>"]
    assert (labels == IGNORED).tolist() == [True, True, False, False, False, False]


def test_characters_of_several_tokens() -> None:
    tokenizer = tiny_tokenizer()
    text = "é€ 日本🙂</s>"
    ids, labels = tokenise(Rendered(text, ((3, len(text)),)), tokenizer)
    kept = labels[labels != IGNORED]
    assert len(ids) == 2 + 3 + 1 + 3 + 3 + 4 + 1
    assert len(kept) == 3 + 3 + 4 + 1
    assert tokenizer.decode(kept.tolist()) == "日本🙂</s>"


def test_offsets_without_width() -> None:
    """'x:' + two spaces whose offsets were cut away + '12': the spaces are prompt or answer by where they stand."""
    offsets = np.asarray([(0, 1), (1, 2), (4, 4), (4, 6)])
    assert _learned(offsets, [(4, 6)]).tolist() == [False, False, False, True]
    assert _learned(offsets, [(2, 6)]).tolist() == [False, False, True, True]
    put_in = np.asarray([(0, 3), (3, 3), (3, 5)])
    assert _learned(put_in, [(3, 5)]).tolist() == [False, True, True]
    assert _learned(put_in, [(0, 3)]).tolist() == [True, False, False]


def test_a_tokenizer_without_offsets_is_refused() -> None:
    with pytest.raises(DataError, match=r"some-model: the tokenizer gives no character offsets"):
        tokenise(Rendered("a", ()), SimpleNamespace(is_fast=False, name_or_path="some-model"))


def test_a_stored_truncation_of_the_tokenizer_is_not_used() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.enable_truncation(4)
    ids, _ = tokenise(Rendered("abcdefgh", ((0, 8),)), tokenizer)
    assert len(ids) == 8


def test_labels_are_what_the_loss_sees() -> None:
    """A model that gives every token the same chance has a loss of log(vocabulary) a trained token, padding or not."""
    tokenizer = tiny_tokenizer()
    rows = []
    for text in ("ab", "abcdef"):
        ids, labels = tokenise(Rendered(text, ((1, len(text)),)), tokenizer)
        rows.append((ids, labels))
    made = [Row(n, ids, labels, (len(ids),), (n,)) for n, (ids, labels) in enumerate(rows)]
    batch = collate(made, pad_id=0)
    logits = torch.zeros(*batch.labels.shape, len(tokenizer))
    loss = torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), batch.labels[:, 1:].flatten(), ignore_index=IGNORED, reduction="sum"
    )
    assert loss.item() == pytest.approx(6 * math.log(len(tokenizer)), rel=1e-6)
