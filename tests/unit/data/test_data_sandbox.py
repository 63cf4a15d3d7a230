"""Templates of unknown people: nothing is reached, no memory is filled, and nothing runs for ever."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from finetune.data import sandbox
from finetune.data.sandbox import SafeEnvironment, write
from finetune.data.templates import load_template
from finetune.errors import DataError
from tests.unit.data.chat_forms import CHATML, render, tiny_tokenizer

BOMBS = {
    "{% for i in range(99999) %}{% for j in range(99999) %}{% set x = 1 %}{% endfor %}{% endfor %}": "turns",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(40) }}": "turns",
    "{% for i in [1, 2] recursive %}{{ loop([1, 2]) if loop.depth < 30 }}{% endfor %}": "turns",
    "{% set n = namespace(x='aa') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}": "characters",
    "{% set n = namespace(x='aa') %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}": "characters",
    "{% set n = namespace(x='aa') %}{% for i in range(60) %}{% set n.x = [n.x, n.x] %}{% endfor %}": "parts",
    "{% set n = namespace(x='aa') %}{% for i in range(60) %}{% set n.x = (n.x, n.x) %}{% endfor %}": "parts",
    "{% set n = namespace(x='aa') %}{% for i in range(60) %}{% set n.x = {1: n.x, 2: n.x} %}{% endfor %}": "parts",
    "{{ 'x' * 10 ** 9 }}": "characters",
    "{{ [1] * 10 ** 9 }}": "cannot be multiplied",
    "{{ 9 ** 9 ** 9 }}": "too large a number",
    "{{ 'x' | center(1000000000) }}": "No filter named 'center'",
    "{{ 'x'.center(1000000000) }}": "unsafe",
    "{{ '%1000000000d' % 1 }}": "not allowed",
    "{{ '{:>1000000000}'.format(1) }}": "unsafe",
    "{{ 'aaaa' | replace('a', 'b' * 1000000) | replace('b', 'c' * 1000000) }}": "characters",
    "{{ namespace() }}": "cannot be written",
    "{{ lipsum(n=100000) }}": "lipsum",
}


@pytest.mark.parametrize("bomb", BOMBS)
@pytest.mark.timeout(60)
def test_a_template_bomb_is_refused(bomb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "MOST_TURNS", 50_000)
    monkeypatch.setattr(sandbox, "MOST_PARTS", 50_000)
    with pytest.raises(Exception, match=BOMBS[bomb]):
        write(SafeEnvironment().compiled(bomb), {})


def test_a_template_that_takes_too_long_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "SECONDS", 0.05)
    slow = "{% for i in range(10000) %}{{ text | upper | length }}{% endfor %}"
    began = time.monotonic()
    with pytest.raises(sandbox.TemplateLimitError, match="longer than"):
        write(SafeEnvironment().compiled(slow), {"text": "a" * 1_000_000})
    assert time.monotonic() - began < 5


@pytest.mark.parametrize(
    "attack",
    [
        "{{ x.__class__.__mro__ }}",
        "{{ x.split.__globals__ }}",
        "{{ namespace.__init__ }}",
        "{{ (x | map(attribute='__class__') | list)[0].mro() }}",
        "{% set n = namespace() %}{{ n.__class__ }}",
    ],
)
def test_attributes_of_python_cannot_be_reached(attack: str) -> None:
    with pytest.raises(Exception, match=r"unsafe|undefined|no attribute"):
        write(SafeEnvironment().compiled(attack), {"x": "a"})


def test_what_templates_need_works() -> None:
    source = (
        "{% macro row(k, v) %}{{ k ~ '=' ~ v }}{% endmacro %}{% set n = namespace(out=[]) %}"
        "{% for k, v in pairs.items() %}{% if loop.last %}{% break %}{% endif %}"
        "{% set n.out = n.out + [row(k, v)] %}{% endfor %}{{ n.out | join(';') }}"
        "{% set a, b = 1, 2 %} {{ a }} {{ pairs | tojson }} {{ ' x '.strip() | upper }} {{ words[1:] | join }}"
        "{% filter upper %} {{ 'b' ~ 'c' }}{% endfilter %}{{ 'abc' | replace('b', 'x') }}"
    )
    made = write(SafeEnvironment().compiled(source), {"pairs": {"é": 1, "l": 2}, "words": ["a", "b"]})
    assert made == 'é=1 1 {"é": 1, "l": 2} X b BCaxc'


OWN = "kind: messages\ncolumns: {messages: {required: true}}\nroles: {user: user, assistant: assistant}\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: &a [1, 2]\nb: *a\n", "anchors and aliases"),
        (OWN + "roles: {user: wizard}\n", r"given twice"),
        (OWN.replace("user: user", "user: wizard"), r"roles\.user is 'wizard'"),
        (OWN + "chat_template: '{{ messages[0].__class__ }}'\n", "does not show a message's content"),
        (OWN + "chat_template: 'hello'\n", "does not show a message's content"),
        (
            OWN + "chat_template: '{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}'\n",
            "turns",
        ),
        (OWN + "tokens: [a]\n", "tokens is a list"),
        ("columns: {a: {}}\nprompt: p\nanswer: '{{ a }}'\nchat_template: x\n", "of kind messages"),
        ("#" * 2_000_000, "more than 1,048,576 bytes"),
        ("x: !!python/object/apply:os.system [true]\n", "not a readable YAML file"),
    ],
)
def test_template_files_of_unknown_people(
    tmp_path: Path, text: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox, "MOST_TURNS", 50_000)
    (tmp_path / "mine.yaml").write_text(text)
    with pytest.raises(DataError, match=message) as caught:
        load_template(str(tmp_path / "mine.yaml"))
    assert "mine.yaml" in str(caught.value)


def test_a_thousand_nested_aliases_take_no_time(tmp_path: Path) -> None:
    laughs = "a0: &a0 [x]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 30))
    (tmp_path / "mine.yaml").write_text(laughs)
    with pytest.raises(DataError, match="anchors and aliases"):
        load_template(str(tmp_path / "mine.yaml"))


def test_b34_a_template_that_brings_its_chat_form_needs_its_tokens() -> None:
    base: Any = tiny_tokenizer(None)
    rendered = render(load_template("gemma"), load_template("gemma").example["record"], "x", base)
    assert rendered.stop == "<end_of_turn>"
    assert base.chat_template == load_template("gemma").chat_template, "what is saved is what was trained"
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    poor = PreTrainedTokenizerFast(tokenizer_object=inner, bos_token=None, eos_token=None)
    with pytest.raises(DataError, match=r"no token <start_of_turn>, <end_of_turn>[\s\S]*completion"):
        render(load_template("gemma"), {}, "x", poor)


def test_b35_replacing_a_models_own_chat_template_is_told() -> None:
    from finetune.data.rendering import Renderer

    tokenizer = tiny_tokenizer(CHATML)
    assert "in the place of the chat template" in Renderer(load_template("llama3"), tokenizer).warnings()[0]
    assert not Renderer(load_template("llama3"), tokenizer).warnings()
