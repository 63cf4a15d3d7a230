"""The meter of a template: what is made without a loop costs too, and the clock is looked at everywhere."""

from __future__ import annotations

import time
import tracemalloc
from pathlib import Path

import pytest

from finetune.data import sandbox
from finetune.data.sandbox import SafeEnvironment, TemplateLimitError, write
from finetune.data.templates import load_template
from finetune.errors import DataError

SETS = "".join(f"{{% set a{n} = MADE %}}" for n in range(60))
HEAVY = {
    SETS.replace("MADE", "'x' * 60000"): "characters together",
    SETS.replace("MADE", "t[1:]"): "characters together",
    SETS.replace("MADE", "t | upper"): "characters together",
    SETS.replace("MADE", "t.upper()"): "characters together",
    SETS.replace("MADE", "t ~ 'x'"): "characters together",
    SETS.replace("MADE", "t | tojson"): "characters together",
    "{% macro m() %}{{ t }}{% endmacro %}" + SETS.replace("MADE", "m()"): "characters together",
    "".join(f"{{% set a{n} %}}{{{{ t }}}}{{% endset %}}" for n in range(60)): "characters together",
    "{% filter length %}{% for i in range(60) %}{{ t }}{% endfor %}{% endfilter %}": "characters together",
    "{% set a %}{% for i in range(900) %}" + "y" * 2000 + "{% endfor %}{% endset %}": "characters together",
    SETS.replace("MADE", "range(900) | list"): "parts together",
    SETS.replace("MADE", "range(900) | list | reverse | list | length"): "parts together",
    SETS.replace("MADE", "range(900) | map('string') | join"): "parts together",
    SETS.replace("MADE", "('x ' * 400).split()"): "parts together",
    "{{ t | list | length }}": "a list of more than 1,000 parts",
    "{{ t | sort }}": "a list of more than 1,000 parts",
    "{{ t | wordcount }}": "a list of more than 1,000 parts",
    "{{ t | title }}": "a list of more than 1,000 parts",
    "{{ t.split() }}": "a list of more than 1,000 parts",
    "{{ t.rsplit('t') }}": "a list of more than 1,000 parts",
    "{{ t.splitlines() }}": "a list of more than 1,000 parts",
    "{% for c in range(9999) if false %}{% endfor %}": "turns",
    "{{ 5 | round(-1000000000) }}": "at most 16 digits",
    "{{ 1 | round(1000000000, 'ceil') }}": "at most 16 digits",
    "{{ ('f' * 5000) | int(0, 16) }}": "too large a number",
    "{% set _finetune_turn = 1 %}": "not for templates",
    "{% set x = " + "[" * 900 + "1" + "]" * 900 + " %}": "nested too deeply",
    "{{ t" + "|trim" * 200 + " }}": "nested too deeply",
    "{{ " + "9" * 5000 + " }}": "cannot be compiled",
}


@pytest.mark.parametrize("source", HEAVY, ids=range(len(HEAVY)))
def test_whatever_a_template_makes_is_metered(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bounds a few hundred times below the real ones, so that the test costs nothing."""
    monkeypatch.setattr(sandbox, "MOST_MADE", 1_000_000)
    monkeypatch.setattr(sandbox, "MOST_PARTS_MADE", 20_000)
    monkeypatch.setattr(sandbox, "MOST_PARTS", 1_000)
    monkeypatch.setattr(sandbox, "MOST_TURNS", 5_000)
    with pytest.raises(TemplateLimitError, match=HEAVY[source]):
        write(SafeEnvironment().compiled(source), {"t": "t" * 60_000})


@pytest.mark.parametrize(
    "act", ["{% if t in t %}{% endif %}", "{% if t is upper %}{% endif %}", "{% set x = t.find('y') %}", "{{ t | d }}"]
)
def test_the_clock_is_looked_at_outside_loops(act: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "SECONDS", 0.0)
    with pytest.raises(TemplateLimitError, match="longer than 0 seconds"):
        write(SafeEnvironment().compiled(act), {"t": "t"})


@pytest.mark.timeout(60)
def test_sixty_large_texts_do_not_fill_the_memory() -> None:
    """With the real bounds: 3.6 GB asked for."""
    source = SETS.replace("MADE", "'x' * 60000000")
    tracemalloc.start()
    try:
        with pytest.raises(TemplateLimitError, match="characters together"):
            write(SafeEnvironment().compiled(source), {})
        assert tracemalloc.get_traced_memory()[1] < 400e6
    finally:
        tracemalloc.stop()


def test_a_long_conversation_is_far_within_the_bounds() -> None:
    """A thousand turns put together one behind another, as templates do that keep their text in a namespace."""
    source = (
        "{% set n = namespace(text='') %}{% for m in messages %}{% if m.role == 'user' and m.content is string %}"
        "{% set n.text = n.text ~ m.content.split('</think>')[-1] | trim %}{% endif %}{% endfor %}{{ n.text }}"
    )
    messages = [{"role": "user", "content": "words " * 50}] * 1000
    assert len(write(SafeEnvironment().compiled(source), {"messages": messages})) == 299 * 1000


HEAD = 'columns: {a: {required: true}}\nchat: never\nanswer: "{{ a }}"\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            HEAD + "prompt: '{{ a" + "|trim" * 200 + " }}'\n",
            "prompt is not a jinja text: the template is nested too deeply",
        ),
        (HEAD + "prompt: " + "[" * 50_000 + "\n", "nested more than 50 deep"),
        (HEAD + "prompt: " + "{a: " * 50_000 + "\n", "nested more than 50 deep"),
        ("- " * 50_000 + "\n", "nested more than 50 deep"),
        ("...\n" * 500 + "[" * 50_000 + "\n", "nested more than 50 deep"),
        (HEAD + "example: [{a: 1, a: 2}]\n", "the key 'a' is given twice"),
        ("".join(f"k{n}: 1\n" for n in range(3_000)), "unknown key 'k0'"),
    ],
    ids=range(7),
)
def test_deep_template_files_are_refused_at_once(tmp_path: Path, text: str, message: str) -> None:
    own = tmp_path / "mine.yaml"
    own.write_text(text)
    began = time.monotonic()
    with pytest.raises(DataError, match=message):
        load_template(str(own))
    assert time.monotonic() - began < 5
