"""Template files: each shipped one's worked example, a user's own, and every way in which one can be wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from finetune.data.cells import RowError
from finetune.data.rendering import Renderer
from finetune.data.templates import load_template, template_names
from finetune.errors import ConfigError, DataError
from tests.unit.data.chat_forms import CHATML, render, tiny_tokenizer

SHIPPED = (
    "alpaca", "chatml", "completion", "gemma", "grammar", "llama3", "messages", "mistral", "qwen", "sharegpt", "summarize",
    "text",
)  # fmt: skip
OWN = (
    "columns: {question: {required: true}, reply: {required: true}}\n"
    "prompt: 'Q: {{ question }}\n\n  A:'\nanswer: ' {{ reply }}'\n"
)


def test_every_shipped_template_is_known() -> None:
    assert tuple(template_names()) == SHIPPED


@pytest.mark.parametrize("name", SHIPPED)
def test_worked_example(name: str) -> None:
    template = load_template(name)
    assert template.name == name
    assert template.description
    assert set(template.example) - {"record"}
    lacking = set()
    for form, tokenizer in (
        ("plain", tiny_tokenizer()),
        ("chat", tiny_tokenizer(CHATML)),
        ("own", tiny_tokenizer()),
        ("own", tiny_tokenizer(CHATML)),
    ):
        expected = template.example.get(form)
        if expected is None:
            lacking.add(form)
            continue
        rendered = render(template, template.example["record"], "example", tokenizer)
        assert rendered.text == expected["text"]
        assert [rendered.text[start:end] for start, end in rendered.spans] == expected["trained"]
    brings = {"messages": {"chat"}, "sharegpt": {"chat"}, "text": {"plain"}}.get(name, {"plain", "chat"})
    assert {"plain", "chat", "own"} - lacking == ({"own"} if template.chat_template else brings)


def test_an_optional_column_may_be_absent_or_empty() -> None:
    alpaca = load_template("alpaca")
    rows = [{"instruction": "Go.", "output": "Gone."} | extra for extra in ({}, {"input": None}, {"input": ""})]
    texts = {render(alpaca, row, "x", tiny_tokenizer()).text for row in rows}
    assert len(texts) == 1
    assert "### Input" not in texts.pop()


def test_train_on_all_learns_the_prompt_too() -> None:
    record = {"input": "a", "target": "b"}
    for tokenizer in (tiny_tokenizer(), tiny_tokenizer(CHATML)):
        rendered = render(load_template("grammar"), record, "x", tokenizer, "all")
        assert rendered.spans == ((0, len(rendered.text.rstrip())),)


def test_a_template_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(OWN)
    template = load_template(str(path))
    record = {"question": "Why?", "reply": "Because."}
    rendered = render(template, record, "x", tiny_tokenizer())
    assert rendered.text == "Q: Why?\nA: Because.</s>"
    assert rendered.text[slice(*rendered.spans[0])] == " Because.</s>"
    assert render(template, record, "x", tiny_tokenizer(CHATML)).text.startswith(
        "<|im_start|>user\nQ: Why?\nA:<|im_end|>"
    )
    path.write_text(OWN + "chat: never\n")
    assert render(load_template(str(path)), record, "x", tiny_tokenizer(CHATML)).text == "Q: Why?\nA: Because.</s>"


def test_own_templates_in_the_working_folder_are_found_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data_templates").mkdir()
    (tmp_path / "data_templates" / "mine.yaml").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    assert load_template("mine").name == "mine"
    assert set(template_names()) == {*SHIPPED, "mine"}


def test_an_unknown_template_names_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"no template 'alpacca'[\s\S]*templates: alpaca, chatml[\s\S]*nearest: 'alpaca'"
    ):
        load_template("alpacca")
    with pytest.raises(DataError, match=r"no such template file"):
        load_template(str(tmp_path / "none.yaml"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("promt: x\n", "unknown key 'promt'"),
        ("kind: chat\n", "kind is 'chat'"),
        ("chat: always\n", "chat is 'always'"),
        ("kind: text\n", "kind text wants jinja texts text"),
        ("kind: messages\n", "kind messages wants jinja texts .none."),
        ("prompt: '{{ qestion }}'\n", "prompt uses 'qestion', which is no column .*nearest: 'question'"),
        ("answer: '{{ reply'\n", "answer is not a jinja text"),
        ("columns: [question]\n", "columns are missing"),
        ("columns: {question: {needed: true}}\n", "may say required and also"),
        ("columns: {question: {required: 1}}\n", "required is true or false"),
        ("prompt: {{{\n", "not a readable YAML file"),
        ("answer: 3\n", "look at 'answer'"),
    ],
)
def test_a_wrong_template_names_its_file_and_fault(tmp_path: Path, change: str, message: str) -> None:
    path = tmp_path / "mine.yaml"
    key = change.split(":")[0]
    kept = [line for line in OWN.replace("\n\n  ", "\\n").splitlines() if not line.startswith(key + ":")]
    path.write_text("\n".join(kept) + "\n" + change)
    with pytest.raises(DataError, match=message) as caught:
        load_template(str(path))
    assert str(path) in str(caught.value)
    path.write_text("- a\n- list\n")
    with pytest.raises(DataError, match=r"a mapping of keys"):
        load_template(str(path))


def test_jinja_is_sandboxed(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("columns: {a: {required: true}}\nprompt: \"{{ a.__class__.__mro__ }}\"\nanswer: '{{ a }}'\n")
    with pytest.raises(DataError, match=r"prompt cannot be written"):
        render(load_template(str(path)), {"a": "x"}, "x", tiny_tokenizer())


def test_b45_a_missing_column_names_file_row_columns_and_the_nearest(prepared: Callable[..., Any]) -> None:
    with pytest.raises(DataError) as caught:
        prepared([{"TEXT": "one", "id": 1}], template="text")
    message = str(caught.value)
    assert "rows.jsonl line 1: the column 'text' that the template 'text' needs is missing" in message
    assert "columns found: TEXT, id; nearest: 'TEXT'" in message
    assert "data.columns.text=NAME" in message
    good = {"instruction": "Go.", "output": "Gone."}
    rows = [good, {"instruction": "Go.", "answer": "Gone."}, good]
    with pytest.raises(DataError, match=r"line 2: the column 'output' .* columns found: instruction, answer"):
        prepared(rows, template="alpaca")
    report = prepared(rows, template="alpaca", on_bad_row="skip").train.report
    assert report.dropped == {"the column 'output' is missing": 1}
    assert report.documents == 2
    assert report.places["the column 'output' is missing"] == ("line 2",)
    with pytest.raises(DataError, match=r"the column 'output' .* is missing"):
        prepared([rows[1]] * 3, template="alpaca", on_bad_row="skip")


def test_columns_are_mapped_by_name(prepared: Callable[..., Any]) -> None:
    rows = [{"question": "Go.", "reply": "Gone."}]
    columns = {"instruction": "question", "output": "reply"}
    mapped = prepared(rows, template="alpaca", columns=columns).train
    assert (
        mapped.fingerprint == prepared([{"instruction": "Go.", "output": "Gone."}], template="alpaca").train.fingerprint
    )
    with pytest.raises(DataError, match=r"no column 'instuction'[\s\S]*nearest: 'instruction'"):
        prepared(rows, template="alpaca", columns={"instuction": "question"})
    with pytest.raises(DataError, match=r"the column 'repply' .*nearest: 'reply'"):
        prepared(rows, template="alpaca", columns={**columns, "output": "repply"})
    with pytest.raises(DataError, match=r"the column 'context' .*is missing"):
        prepared(rows, template="alpaca", columns={**columns, "input": "context"})


def test_b47_null_and_empty_contents_by_policy(prepared: Callable[..., Any]) -> None:
    rows: list[dict[str, Any]] = [
        {"messages": [{"role": "user", "content": f"Hi {n}"}, {"role": "assistant", "content": "Hello"}]}
        for n in range(20)
    ]
    rows[12]["messages"][1]["content"] = None
    rows[16]["messages"][0]["content"] = ""
    rows[18]["messages"] = []
    with pytest.raises(DataError) as caught:
        prepared(rows)
    message = str(caught.value)
    assert "3 of 20 rows cannot be used" in message
    assert "line 13, message 2: 'content' of the assistant message is empty" in message
    assert "line 17, message 1: 'content' of the user message is empty" in message
    assert "line 19: column 'messages' is empty" in message
    report = prepared(rows, on_bad_row="skip").train.report
    assert (report.rows_in, report.rows_kept, sum(report.dropped.values())) == (20, 17, 3)
    assert sorted(place for places in report.places.values() for place in places) == ["line 13", "line 17", "line 19"]
    many = [{"text": None}] * 7 + [{"text": "one"}]
    with pytest.raises(DataError, match=r"7 of 8 rows cannot be used \(the first 5\)") as caught:
        prepared(many, template="text")
    assert "line 5" in str(caught.value)
    assert "line 6" not in str(caught.value)


def test_b52_numbers_become_text_and_are_counted_other_values_are_refused(prepared: Callable[..., Any]) -> None:
    rows: list[dict[str, Any]] = [
        {"input": "6 * 7", "target": 42},
        {"input": 1.5, "target": "x"},
        {"input": "a", "target": "b"},
    ]
    held = prepared(rows, template="grammar").train
    assert held.report.notes == {"rows with a number converted to text": 2}
    assert held.report.places["rows with a number converted to text"] == ("line 1", "line 2")
    tokenizer = tiny_tokenizer(CHATML)
    assert "42<|im_end|>" in tokenizer.decode(held[0].input_ids.tolist())
    for value, kind in ((True, "a boolean"), (["a"], "a list"), ({"a": 1}, "an object")):
        with pytest.raises(RowError, match=f"line 2: column 'target' holds {kind}; text is wanted"):
            prepared([rows[2], {"input": "a", "target": value}], template="grammar")


def test_half_a_character_is_a_fault_of_its_row(prepared: Callable[..., Any]) -> None:
    rows = ['{"text": "good"}', '{"text": "bad \\ud83d"}']
    with pytest.raises(DataError, match=r"line 2: the text holds half a character"):
        prepared(rows, tiny_tokenizer(), template="text")
    assert prepared(rows, tiny_tokenizer(), template="text", on_bad_row="skip").train.report.dropped == {
        "half a character": 1
    }


def test_contradictions_are_listed_together(prepared: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        prepared([{"text": "a"}], template="text", train_on="last", split="validation")
    assert [fault.where for fault in caught.value.faults] == ["data.split", "data.train_on"]
    assert "rows.jsonl is a file" in caught.value.faults[0].what
    with pytest.raises(ConfigError, match=r"only plain documents"):
        prepared([{"messages": []}], on_long="split")


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ question + 1 }}", "can only concatenate str"),
        ("{% for i in range(1000000000) %}x{% endfor %}", "Range too big"),
        ("{% include 'x' %}", "no loader"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "maximum recursion depth"),
        ("{{ question.__class__ }}", "unsafe"),
    ],
)
def test_whatever_a_template_raises_is_its_fault(tmp_path: Path, prompt: str, reason: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(OWN.replace("Q: {{ question }}", prompt.replace("'", "''")))
    with pytest.raises(DataError, match=reason) as caught:
        render(load_template(str(path)), {"question": "a", "reply": "b"}, "x", tiny_tokenizer())
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name: 2024-13-45\n", "not a readable YAML file"),
        ("[" * 100_000, "not a readable YAML file"),
        ("&a {b: *a}\n", "not a readable YAML file"),
        (OWN + "roles: [a]\n", "roles is not a table"),
        (OWN + "answer: '{{ question }}'\n", "the key 'answer' is given twice"),
        (OWN.replace("reply: {required: true}", "question: {}"), "the key 'question' is given twice"),
    ],
)
def test_template_files_that_are_broken_or_ambiguous(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "mine.yaml").write_text(text)
    with pytest.raises(DataError, match=message):
        load_template(str(tmp_path / "mine.yaml"))


@pytest.mark.parametrize("tokenizer", [tiny_tokenizer(), tiny_tokenizer(CHATML)], ids=["plain", "chat"])
def test_a_prompt_fills_the_column_that_the_templates_prompt_takes(tmp_path: Path, tokenizer: Any) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("columns: {reply: {required: true}, question: {required: true}}\n" + OWN.split("\n", 1)[1])
    prompt = Renderer(load_template(str(path)), tokenizer).prompt("why?")
    assert "Q: why?" in prompt
    assert "answer" not in prompt
    path.write_text(OWN.replace("{required: true}", "{}"))
    assert "Q: why?" in Renderer(load_template(str(path)), tokenizer).prompt("why?")
    path.write_text(OWN.replace("{question", "{context: {required: true}, question").replace("Q:", "{{ context }}"))
    with pytest.raises(DataError, match="made from context, question, and one text is given"):
        Renderer(load_template(str(path)), tokenizer).prompt("why?")


def test_a_prompt_that_writes_the_system_text_itself_is_not_given_it_again(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(OWN.replace("reply: {", "system: {}, reply: {").replace("Q: ", "{{ system }} Q: "))
    record = {"question": "Why?", "reply": "Because.", "system": "Be brief."}
    text = render(load_template(str(path)), record, "x", tiny_tokenizer(CHATML)).text
    assert text.startswith("<|im_start|>user\nBe brief. Q: Why?")
    assert text.count("Be brief.") == 1


@pytest.mark.parametrize("name", ["alpaca", "messages", "chatml", "completion"])
def test_a_prompt_has_the_system_text_of_the_recipe(name: str) -> None:
    for tokenizer in (tiny_tokenizer(CHATML), tiny_tokenizer(CHATML if name == "messages" else None)):
        prompt = Renderer(load_template(name), tokenizer).prompt("why?", "Be brief.")
        assert prompt.index("Be brief.") < prompt.index("why?")
        assert "Be brief." not in Renderer(load_template(name), tokenizer).prompt("why?")
    assert Renderer(load_template("text"), tiny_tokenizer()).prompt("why?", "Be brief.") == "why?"
