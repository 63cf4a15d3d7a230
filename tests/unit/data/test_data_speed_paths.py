"""The short ways of preparation give what the long ways give: token lengths for offsets, one compiled chat template."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, normalizers, pre_tokenizers, processors

from finetune.contracts import IGNORED
from finetune.data import sandbox
from finetune.data.byte_lengths import ByteLengths
from finetune.data.chat_writer import ChatWriter
from finetune.data.rendering import Rendered, Renderer
from finetune.data.templates import load_template
from finetune.data.tokens import byte_lengths, tokenise_all
from finetune.errors import DataError
from tests.unit.data.chat_forms import CHATML, render, tiny_tokenizer

LETTERS = [
    "a",
    "b",
    " ",
    "  ",
    "\n",
    "é",
    "日",
    "🙂",
    "the",
    "Hello",
    " world",
    "<|im_end|>",
    "</s>",
    "e\u0301",
    "\n\n",
]


def drawn(count: int = 400) -> list[Rendered]:
    """Random texts with random spans; words that merge, characters of several tokens, special tokens among them."""
    draw, made = random.Random(0), []
    for _ in range(count):
        text = "".join(draw.choices(LETTERS, k=draw.randint(1, 30)))
        cuts = sorted(draw.sample(range(len(text) + 1), k=min(len(text) + 1, 2 * draw.randint(0, 3))))
        made.append(Rendered(text, tuple(zip(cuts[::2], cuts[1::2], strict=False))))
    return made


def agree(tokenizer: Any, lengths: ByteLengths | None) -> None:
    texts = drawn()
    slow, fast = tokenise_all(texts, tokenizer), tokenise_all(texts, tokenizer, lengths)
    for item, (ids, labels), (own, learned) in zip(texts, slow, fast, strict=True):
        assert np.array_equal(ids, own), item
        assert np.array_equal(labels, learned), item
        assert own.dtype == learned.dtype == np.int32


def test_lengths_of_tokens_give_the_labels_that_offsets_give() -> None:
    tokenizer = tiny_tokenizer()
    lengths = byte_lengths(tokenizer)
    assert lengths is not None
    assert lengths.lengths[tokenizer.convert_tokens_to_ids("Hello")] == 5
    assert lengths.lengths[tokenizer.convert_tokens_to_ids("<|im_end|>")] == 10
    agree(tokenizer, lengths)


def test_a_text_that_loses_bytes_is_measured_by_offsets() -> None:
    """An added token that swallows the blanks around it: the sum of the lengths tells, and only that text goes back."""
    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.add_tokens([AddedToken("b", lstrip=True, rstrip=True, normalized=False)])
    lengths = byte_lengths(tokenizer)
    assert lengths is not None
    agree(tokenizer, lengths)


def test_a_normalizer_that_changes_a_text_is_seen() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.normalizer = normalizers.NFC()
    lengths = byte_lengths(tokenizer)
    assert lengths is not None
    assert lengths.unchanged("é")
    assert not lengths.unchanged("e\u0301")
    agree(tokenizer, lengths)


@pytest.mark.parametrize("prefix", [False, True])
def test_offsets_whose_blanks_are_cut_off(prefix: bool) -> None:
    """As Llama 3 has them; words with a space in front, and tokens of spaces alone."""
    tokenizer = tiny_tokenizer(bos=True)
    inner = tokenizer.backend_tokenizer
    cut = processors.ByteLevel(trim_offsets=True, add_prefix_space=prefix)
    inner.post_processor = processors.Sequence([cut, inner.post_processor])
    lengths = byte_lengths(tokenizer)
    assert lengths is not None
    assert lengths.trims is not None
    agree(tokenizer, lengths)


@pytest.mark.parametrize("change", ["prefix", "lower", "unknown"])
def test_a_tokenizer_that_adds_has_no_lengths(change: str) -> None:
    inner = tiny_tokenizer().backend_tokenizer
    if change == "prefix":
        inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    elif change == "lower":
        inner.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])
    else:
        inner.model.unk_token = "a"
    assert ByteLengths.of(inner) is None


def test_a_batch_of_odd_texts() -> None:
    tokenizer = tiny_tokenizer()
    texts = [Rendered("", ()), Rendered("ab", ((0, 2),)), Rendered("a", ()), Rendered("", ((0, 0),))]
    found = [labels.tolist() for _, labels in tokenise_all(texts, tokenizer, byte_lengths(tokenizer))]
    assert found == [[], [IGNORED, tokenizer.convert_tokens_to_ids("b")], [IGNORED], []]


def talks() -> list[list[dict[str, Any]]]:
    user, answer = {"role": "user", "content": " a\n"}, {"role": "assistant", "content": "b</think>c"}
    return [
        [user], [user, answer], [{"role": "system", "content": ""}, user, answer, user, answer],
        [user, {**answer, "reasoning_content": "r"}], [user, {**answer, "weight": 3}],
    ]  # fmt: skip


@pytest.mark.parametrize(
    "template", [CHATML, load_template("llama3").chat_template, "{{ messages|tojson }}{{ tools }}"]
)
def test_the_short_way_writes_what_transformers_writes(template: str) -> None:
    tokenizer = tiny_tokenizer(template, bos=True)
    writer = ChatWriter(tokenizer, bounded=False)
    for _ in range(2):
        for talk in talks():
            for prompt in (False, True):
                expected = tokenizer.apply_chat_template(talk, tokenize=False, add_generation_prompt=prompt)
                assert writer.text(talk, None, prompt) == expected
    with pytest.raises(ValueError, match="empty conversation"):
        writer.text([], None, False)


@pytest.mark.parametrize("name", ["chatml", "llama3", "mistral", "qwen", "gemma"])
def test_b35_a_text_under_bounds_is_the_text_that_is_served(name: str) -> None:
    template = load_template(name)
    tokenizer = tiny_tokenizer(template.chat_template, bos=True)
    writer = ChatWriter(tokenizer, bounded=True)
    for talk in talks()[:2]:
        for content in ("a", "x\n\n", " <think>y</think> z"):
            said = [{**message, "content": content} for message in talk]
            assert writer.text(said, None, False) == tokenizer.apply_chat_template(said, tokenize=False)


def own(folder: Path, chat_template: str) -> Any:
    lines = "\n".join("  " + line for line in chat_template.split("\n"))
    roles = "roles: {user: user, assistant: assistant, system: system}"
    text = f"kind: messages\ncolumns: {{messages: {{required: true}}}}\n{roles}\nchat_template: |-\n{lines}\n"
    (folder / "mine.yaml").write_text(text)
    return load_template(str(folder / "mine.yaml"))


def test_each_row_of_an_own_chat_template_is_metered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The conversation of the trial is short, a row may be long: the turns of its loops are counted too."""
    monkeypatch.setattr(sandbox, "MOST_TURNS", 2_000)
    loop = "{% for letter in m.content %}{% for other in m.content %}{% endfor %}{% endfor %}"
    turn = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    template = own(tmp_path, f"{{% for m in messages %}}{turn}{loop}{{% endfor %}}")
    tokenizer = tiny_tokenizer(None)
    short = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "ab"}]
    assert "ab<|im_end|>" in render(template, {"messages": short}, "row 1", tokenizer).text
    long = [{"role": "user", "content": "ab" * 50}, {"role": "assistant", "content": "ab"}]
    with pytest.raises(DataError, match=r"row 2: .*more than 2,000 turns of its loops"):
        render(template, {"messages": long}, "row 2", tokenizer)
    tools = [{"type": "function", "function": {"name": "x", "parameters": {}}}]
    with pytest.raises(sandbox.TemplateLimitError, match="more than 2,000 turns of its loops"):
        ChatWriter(tokenizer, bounded=True).text(long, tools, False)


def test_a_text_that_bounds_would_change_is_refused(tmp_path: Path) -> None:
    """tojson under bounds knows no separators; the texts of the two ways are held against each other."""
    turn = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{{ {'a': [1, 2]}|tojson(separators=(',', ':')) }}\n"
    template = own(tmp_path, f"{{% for m in messages %}}{turn}{{% endfor %}}")
    with pytest.raises(DataError, match="another text under the bounds"):
        Renderer(template, tiny_tokenizer(None))
