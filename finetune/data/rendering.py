"""Records to text: a template bound to a tokenizer writes each record and marks the characters that are learned."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from finetune.data.byte_lengths import ByteLengths
from finetune.data.cells import BROKEN, RowError, empty_answer, is_empty, text_cell
from finetune.data.chat import Conversation, conversation, with_system
from finetune.data.own_chat import adopt
from finetune.data.sandbox import write
from finetune.data.shown import texts_in
from finetune.data.spans import STOPPED, ChatForm, Span
from finetune.data.templates import SYSTEM, Template, nearest
from finetune.errors import DataError

SPECIAL_TEXT = "rows whose own text holds a special token's text"
MOST_HEADERS = 1000
"""Different lists of columns whose names are remembered; a file of more is looked up row by row."""
NO_TURN = "no turn to learn (no assistant message, or all of them set aside)"


@dataclass(frozen=True)
class Rendered:
    """A record as text, and the character spans of it that are learned.

    `stop` is the text that a complete answer ends with ('' where there is none); `injected` says that the chat template
    added a system text of its own; `notes` are things about this row to be counted.
    """

    text: str
    spans: tuple[Span, ...]
    stop: str = ""
    injected: bool = False
    notes: tuple[str, ...] = ()


class Renderer:
    """A template bound to a tokenizer: its chat form, begin and stop tokens are looked up once."""

    def __init__(self, template: Template, tokenizer: Any, train_on: str = "assistant") -> None:
        self.template = template
        self.tokenizer = tokenizer
        self.train_on = train_on
        self._adopted = adopt(template, tokenizer)
        chat = template.kind == "messages" or (template.kind == "prompt" and template.chat)
        has_form = bool(getattr(tokenizer, "chat_template", None))
        if template.kind == "messages" and not has_form:
            name = getattr(tokenizer, "name_or_path", "") or "the model"
            raise DataError(
                f"the tokenizer of {name} has no chat template, so rows of messages cannot be rendered",
                where=f"data.template={template.name}",
                remedy="use an instruct model, put a chat_template.jinja beside the tokenizer files, a template that "
                "brings one (chatml, llama3, mistral, qwen, gemma), "
                "or a template that needs none (alpaca, grammar, summarize, text)",
            )
        self.form = ChatForm(tokenizer, bounded=bool(template.chat_template)) if chat and has_form else None
        key = "prompt" if self.form else self._plain
        self.writes_system = key in template.sources and SYSTEM in template.columns_of(key)
        self.begin = begin_text(tokenizer)
        self.end = tokenizer.eos_token or ""
        self._names: dict[tuple[str, ...], dict[str, str]] = {}
        self.special = [token for token in tokenizer.all_special_tokens if len(token) > 2]

    @property
    def _plain(self) -> str:
        """The key of the prompt's text where there is no chat template."""
        return "plain" if "plain" in self.template.sources else "prompt"

    @cached_property
    def lengths(self) -> ByteLengths | None:
        """The bytes of the tokenizer's tokens, where they tell where tokens stand."""
        return ByteLengths.of(self.tokenizer.backend_tokenizer) if getattr(self.tokenizer, "is_fast", False) else None

    @property
    def stop(self) -> str:
        """The text that a complete answer ends with."""
        return self.form.probe.stop if self.form else self.end

    def warnings(self) -> list[str]:
        """What is odd about this tokenizer, its chat template and `data.columns`, for every row alike."""
        doubled = self.template.doubled()
        if self.form:
            return [*doubled, *self._adopted, *self.form.probe.warnings]
        return (
            doubled
            if self.end
            else [*doubled, "the tokenizer has no end-of-text token: the model cannot learn to stop"]
        )

    def render(self, record: Mapping[str, Any], where: str) -> Rendered:
        """One record as text with its learned spans; RowError names the row, the column and the reason."""
        notes: set[str] = set()
        if BROKEN in record:
            what, reason, remedy = record[BROKEN]
            raise RowError(what, where, reason=reason, remedy=remedy)
        cells, names = self._cells(record, where, notes)
        if self.template.kind == "messages":
            talk = conversation(cells, names, self.template.roles, where, notes)
            system = text_cell(cells.get(SYSTEM), names.get(SYSTEM, SYSTEM), where, notes)
            talk = with_system(talk, system, where)
            rendered = self._chat(talk, where, notes)
        else:
            values = self._values(cells, names, where, notes)
            rendered = (
                self._text(values, where, notes) if self.template.kind == "text" else self._asked(values, where, notes)
            )
        try:
            rendered.text.encode()
        except UnicodeEncodeError as error:
            what = f"the text holds half a character (the lone surrogate {rendered.text[error.start]!r})"
            raise RowError(what, where, reason="half a character", remedy="mend the text's encoding") from error
        return replace(rendered, notes=tuple(sorted(notes))) if notes else rendered

    def prompt(self, text: str, system: str | None = None) -> str:
        """What the model is given to answer `text` (the column that the template's prompt needs, or a user's turn).

        `system` is the system text in front of it (data.system), where the template takes one.
        """
        if self.template.kind == "text":
            return self._begun(text)
        if self.template.kind == "messages":
            turns = [{"role": "user", "content": text}, {"role": "assistant", "content": "answer"}]
            record: dict[str, Any] = {"messages": turns}
        else:
            column = self.template.asked_column("prompt" if self.form else self._plain)
            record = dict.fromkeys(self.template.columns_of("answer"), "answer") | {column: text}
            record = dict.fromkeys(self.template.required, "answer") | record
        if system and self.template.takes_system:
            record[SYSTEM] = system
        named = {self.template.mapping.get(name, name): value for name, value in record.items()}
        asked = Renderer(self.template, self.tokenizer) if self.train_on == "all" else self
        rendered = asked.render(named, "the prompt")
        return rendered.text[: rendered.spans[0][0]]

    def _cells(self, record: Mapping[str, Any], where: str, notes: set[str]) -> tuple[dict[str, Any], dict[str, str]]:
        key = tuple(record)
        names = self._names.get(key)
        if names is None:
            missing = self.template.missing(record)
            if missing:
                raise missing_column(missing[0], list(record), where, self.template)
            names = self.template.file_columns(record)
            if len(self._names) < MOST_HEADERS:
                self._names[key] = names
        for column in self.template.columns:
            for other in column.also if names.get(column.name) == column.name else ():
                if not is_empty(record.get(other)) and record[other] != record[column.name]:
                    notes.add(f"rows with both {column.name!r} and {other!r} ({column.name!r} is taken)")
        return {column: record[name] for column, name in names.items()}, names

    def _values(
        self, cells: Mapping[str, Any], names: Mapping[str, str], where: str, notes: set[str]
    ) -> dict[str, str]:
        """Every column as text; an absent optional one is ''."""
        values = {}
        for column in self.template.columns:
            name = names.get(column.name, column.name)
            value = cells.get(column.name)
            if column.required and is_empty(value):
                what = f"column {name!r} is empty"
                raise RowError(what, where, reason=what, remedy="write it, or set data.on_bad_row=skip")
            values[column.name] = text_cell(value, name, where, notes)
        self._scan(values.values(), notes)
        return values

    def _scan(self, texts: Iterable[str], notes: set[str]) -> None:
        """Notes a special token's text in the row's own texts; a line feed between them makes no token of two."""
        joined = "\n".join(texts)
        if any(token in joined for token in self.special):
            notes.add(SPECIAL_TEXT)

    def _write(self, key: str, values: Mapping[str, str]) -> str:
        try:
            return write(self.template.texts[key], values)
        except Exception as error:
            # A template is a program of the user's: whatever it raises is a fault of the template.
            reason = (str(error) or type(error).__name__).splitlines()[0]
            raise DataError(f"the template's {key} cannot be written: {reason}", where=self.template.path) from error

    def _asked(self, values: Mapping[str, str], where: str, notes: set[str]) -> Rendered:
        answer = self._write("answer", values)
        if is_empty(answer):
            raise empty_answer(where)
        key = "prompt" if self.form else self._plain
        system = "" if self.writes_system else values.get(SYSTEM, "")
        if self.form:
            turns = [{"role": "user", "content": self._write(key, values)}, {"role": "assistant", "content": answer}]
            talk = with_system(Conversation(turns, None, [True, True]), system, where)
            return self._chat(talk, where, notes, scan=False)
        prompt = self._begun((f"{system}\n\n" if system.strip() else "") + self._write(key, values))
        ended = self._ended(answer, notes)
        if is_empty(ended.removesuffix(self.end)):
            raise empty_answer(where)
        text = prompt + ended
        start = 0 if self.train_on == "all" else len(prompt)
        return Rendered(text, ((start, len(text)),), stop=self.end)

    def _text(self, values: Mapping[str, str], where: str, notes: set[str]) -> Rendered:
        """A document: all of it is learned, its end too."""
        ended = self._ended(self._write("text", values), notes)
        if is_empty(ended.removesuffix(self.end)):
            raise empty_answer(where, "the text is empty")
        text = self._begun(ended)
        return Rendered(text, ((0, len(text)),), stop=self.end)

    def _begun(self, text: str) -> str:
        return text if text.startswith(self.begin) else self.begin + text

    def _ended(self, text: str, notes: set[str]) -> str:
        """The text with exactly one stop token at its end."""
        while self.end and text.rstrip().endswith(self.end):
            notes.add(STOPPED)
            text = text.rstrip()[: -len(self.end)]
        return text + self.end

    def _chat(self, talk: Conversation, where: str, notes: set[str], scan: bool = True) -> Rendered:
        form = self.form
        assert form is not None
        if scan:
            self._scan(texts_in([talk.messages, talk.tools]), notes)
        text, turns = form.render(talk, where, notes)
        injected = bool(form.probe.injected) and talk.messages[0]["role"] != "system"
        last = max(turns, default=-1)
        chosen = [
            span for index, span in turns.items() if talk.trained[index] and (self.train_on != "last" or index == last)
        ]
        if self.train_on == "all":
            if not all(talk.trained):
                raise RowError(
                    "a message says train=false, but data.train_on=all", where, "train flags under train_on=all"
                )
            chosen = [(0, max([len(text.rstrip()), *(end for _, end in turns.values())]))]
        return Rendered(text, tuple(sorted(chosen)), form.probe.stop, injected)


def begin_text(tokenizer: Any) -> str:
    """What the tokenizer itself puts before a text (its BOS), as text; '' when it adds nothing."""
    plain = tokenizer("a", add_special_tokens=False)["input_ids"]
    full = tokenizer("a", add_special_tokens=True)["input_ids"]
    for count in range(len(full) - len(plain) + 1):
        if full[count : count + len(plain)] == plain:
            return "".join(tokenizer.convert_ids_to_tokens(full[:count]))
    return ""


def missing_column(name: str, found: list[str], where: str, template: Template) -> RowError:
    """The fault of a row without a required column: what it has, and the nearest name."""
    shown = ", ".join(map(str, found)) or "none"
    column = next(
        (column.name for column in template.columns if template.mapping.get(column.name, column.name) == name), name
    )
    remedy = f"set data.columns.{column}=NAME if the file calls it otherwise"
    if column in template.mapping:
        remedy = f"data.columns.{column} says {name!r}: give one of the columns found"
    what = f"the column {name!r} that the template {template.name!r} needs is missing; columns found: {shown}"
    return RowError(what + nearest(name, found), where, reason=f"the column {name!r} is missing", remedy=remedy)
