"""Templates: how a record becomes the text that is trained on, and which characters of it are learned.

A template is one YAML file: columns, and either a prompt and an answer (jinja, sandboxed), or `kind: messages`, or
`kind: text`. Where the tokenizer has a chat template, a prompt is asked as the user turn and the answer is the
assistant turn (`chat: never` turns that off), since the model will be asked in that form; otherwise both are plain.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from finetune.data.cells import RowError, is_empty, text_cell
from finetune.data.chat import Conversation, conversation
from finetune.data.spans import STOPPED, ChatForm, Span
from finetune.errors import DataError

KINDS = ("prompt", "messages", "text")
KEYS = ("name", "description", "kind", "columns", "chat", "prompt", "plain", "answer", "text", "roles", "example")
JINJA_OF_KIND = {"prompt": ("prompt", "answer"), "messages": (), "text": ("text",)}
"""Kind of template: the jinja texts that it must give. A prompt template may also give `plain`."""
SPECIAL_TEXT = "rows whose own text holds a special token's text"
NO_TURN = "no turn to learn (no assistant message, or all of them set aside)"


@dataclass(frozen=True)
class Column:
    """A template's column. `also` are other names that files use for it, tried in order when its own is absent."""

    name: str
    required: bool
    also: tuple[str, ...] = ()


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


@dataclass(frozen=True)
class Template:
    """One template file, read. `mapping` names the file's column for a template column (`data.columns`)."""

    name: str
    description: str
    kind: str
    columns: tuple[Column, ...]
    chat: bool
    sources: Mapping[str, str]
    roles: Mapping[str, str]
    example: Mapping[str, Any]
    path: str
    mapping: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def texts(self) -> dict[str, Any]:
        """The compiled jinja texts by key."""
        environment = _environment()
        return {key: environment.from_string(source) for key, source in self.sources.items()}

    def mapped(self, mapping: Mapping[str, str]) -> Template:
        """The same template reading other columns. DataError for a column that the template does not have."""
        names = [column.name for column in self.columns]
        for name in mapping:
            if name not in names:
                where, remedy = (
                    f"data.columns.{name}",
                    f"columns of {self.name}: {', '.join(names)}{_near(name, names)}",
                )
                raise DataError(f"the template {self.name!r} has no column {name!r}", where=where, remedy=remedy)
        return replace(self, mapping=dict(mapping))

    def file_columns(self, present: Mapping[str, Any] | list[str]) -> dict[str, str]:
        """Template column: the column of a file that has `present`; absent optional columns are left out."""
        found = {}
        for column in self.columns:
            own = self.mapping.get(column.name)
            names = (own,) if own else (column.name, *column.also)
            name = next((name for name in names if name in present), None)
            if name is not None:
                found[column.name] = name
        return found

    def missing(self, present: Mapping[str, Any] | list[str]) -> list[str]:
        """Names, as the file should have them, of required (or mapped) columns that are not `present`."""
        found = self.file_columns(present)
        return [
            self.mapping.get(column.name, column.name)
            for column in self.columns
            if column.name not in found and (column.required or column.name in self.mapping)
        ]

    def render(self, record: Mapping[str, Any], where: str, tokenizer: Any, train_on: str = "assistant") -> Rendered:
        """One record as text with its learned spans. For many rows make a Renderer once. Raises RowError."""
        return Renderer(self, tokenizer, train_on).render(record, where)


class Renderer:
    """A template bound to a tokenizer: its chat form, begin and stop tokens are looked up once."""

    def __init__(self, template: Template, tokenizer: Any, train_on: str = "assistant") -> None:
        self.template = template
        self.tokenizer = tokenizer
        self.train_on = train_on
        chat = template.kind == "messages" or (template.kind == "prompt" and template.chat)
        has_form = bool(getattr(tokenizer, "chat_template", None))
        if template.kind == "messages" and not has_form:
            name = getattr(tokenizer, "name_or_path", "") or "the model"
            raise DataError(
                f"the tokenizer of {name} has no chat template, so rows of messages cannot be rendered",
                where=f"data.template={template.name}",
                remedy="use an instruct model, put a chat_template.jinja beside the tokenizer files, "
                "or a template that needs none (alpaca, grammar, summarize, text)",
            )
        self.form = ChatForm(tokenizer) if chat and has_form else None
        self.begin = begin_text(tokenizer)
        self.end = tokenizer.eos_token or ""
        self.special = [token for token in tokenizer.all_special_tokens if len(token) > 2]

    @property
    def stop(self) -> str:
        """The text that a complete answer ends with."""
        return self.form.probe.stop if self.form else self.end

    def warnings(self) -> list[str]:
        """What is odd about this tokenizer and its chat template, for every row alike."""
        if self.form:
            return list(self.form.probe.warnings)
        return [] if self.end else ["the tokenizer has no end-of-text token: the model cannot learn to stop"]

    def render(self, record: Mapping[str, Any], where: str) -> Rendered:
        """One record as text with its learned spans; RowError names the row, the column and the reason."""
        notes: set[str] = set()
        cells, names = self._cells(record, where)
        if self.template.kind == "messages":
            talk = conversation(cells, names, self.template.roles, where, notes)
            rendered = self._chat(talk, where, notes)
        else:
            values = self._values(cells, names, where, notes)
            rendered = self._text(values, notes) if self.template.kind == "text" else self._asked(values, where, notes)
        try:
            rendered.text.encode()
        except UnicodeEncodeError as error:
            what = f"the text holds half a character (the lone surrogate {rendered.text[error.start]!r})"
            raise RowError(what, where, reason="half a character", remedy="mend the text's encoding") from error
        return replace(rendered, notes=tuple(sorted(notes)))

    def prompt(self, text: str) -> str:
        """What the model is given to answer `text` (the template's first required column, or a user's turn)."""
        first, *others = [column.name for column in self.template.columns if column.required]
        if self.template.kind == "text":
            return self._begun(text)
        if self.template.kind == "messages":
            turns = [{"role": "user", "content": text}, {"role": "assistant", "content": "answer"}]
            record: dict[str, Any] = {first: turns}
        else:
            record = {first: text, **dict.fromkeys(others, "answer")}
        named = {self.template.mapping.get(name, name): value for name, value in record.items()}
        asked = Renderer(self.template, self.tokenizer) if self.train_on == "all" else self
        rendered = asked.render(named, "the prompt")
        return rendered.text[: rendered.spans[0][0]]

    def _cells(self, record: Mapping[str, Any], where: str) -> tuple[dict[str, Any], dict[str, str]]:
        missing = self.template.missing(record)
        if missing:
            raise missing_column(missing[0], list(record), where, self.template)
        names = self.template.file_columns(record)
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
        if any(token in value for value in values.values() for token in self.special):
            notes.add(SPECIAL_TEXT)
        return values

    def _write(self, key: str, values: Mapping[str, str]) -> str:
        from jinja2 import TemplateError

        try:
            return str(self.template.texts[key].render(values))
        except TemplateError as error:
            raise DataError(f"the template's {key} cannot be written: {error}", where=self.template.path) from error

    def _asked(self, values: Mapping[str, str], where: str, notes: set[str]) -> Rendered:
        answer = self._write("answer", values)
        if is_empty(answer):
            raise RowError("the answer is empty", where, reason="the answer is empty")
        if self.form:
            turns = [
                {"role": "user", "content": self._write("prompt", values)},
                {"role": "assistant", "content": answer},
            ]
            return self._chat(Conversation(turns, None, [True, True]), where, notes, scan=False)
        prompt = self._begun(self._write("plain" if "plain" in self.template.texts else "prompt", values))
        text = prompt + self._ended(answer, notes)
        start = 0 if self.train_on == "all" else len(prompt)
        return Rendered(text, ((start, len(text)),), stop=self.end)

    def _text(self, values: Mapping[str, str], notes: set[str]) -> Rendered:
        """A document: all of it is learned, its end too."""
        text = self._begun(self._ended(self._write("text", values), notes))
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
        if scan and any(token in message["content"] for message in talk.messages for token in self.special):
            notes.add(SPECIAL_TEXT)
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
    what = f"the column {name!r} that the template {template.name!r} needs is missing; columns found: {shown}"
    return RowError(what + _near(name, found), where, reason=f"the column {name!r} is missing", remedy=remedy)


def _near(name: str, names: list[str]) -> str:
    lower = {str(other).lower(): str(other) for other in names}
    near = difflib.get_close_matches(name.lower(), lower, n=1, cutoff=0.5)
    return f"; nearest: {lower[near[0]]!r}" if near else ""


def _environment() -> Any:
    from jinja2 import StrictUndefined
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    return ImmutableSandboxedEnvironment(undefined=StrictUndefined, keep_trailing_newline=True, autoescape=False)


def template_names() -> list[str]:
    """Names of the templates in ./data_templates and of those that come with the program."""
    return sorted({file.stem for folder in _folders() for file in folder.glob("*.yaml")})


def _folders() -> list[Path]:
    """Where templates are looked up by name: the user's own first."""
    package = Path(__file__).resolve().parents[1]
    candidates = [Path("data_templates"), package / "data_templates", package.parent / "data_templates"]
    return [folder for folder in candidates if folder.is_dir()]


def load_template(name: str) -> Template:
    """A template by its name, or from a YAML file of the user's own. DataError names the file and the key at fault."""
    own = Path(name).expanduser()
    if own.suffix in (".yaml", ".yml") or len(own.parts) > 1:
        if not own.is_file():
            raise DataError("no such template file", where=f"data.template={name}", remedy="check the path")
        return _read(own)
    for folder in _folders():
        file = folder / f"{name}.yaml"
        if file.is_file():
            return _read(file)
    names = template_names()
    remedy = f"templates: {', '.join(names)}{_near(name, names)}; or give the path of a YAML file"
    raise DataError(f"there is no template {name!r}", where="data.template", remedy=remedy)


def _read(file: Path) -> Template:
    import yaml

    try:
        raw = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError, OSError) as error:
        reason = " ".join(str(error).split())
        raise DataError(
            f"not a readable YAML file: {reason}", where=str(file), remedy="see data_templates/alpaca.yaml"
        ) from error
    if not isinstance(raw, dict):
        raise DataError("a template is a mapping of keys", where=str(file), remedy="see data_templates/alpaca.yaml")
    return _checked(raw, file)


def _checked(raw: dict[str, Any], file: Path) -> Template:
    """The template of a parsed YAML; every key is known, and every jinja text uses columns that it declares."""
    place = str(file)
    for key in raw:
        if key not in KEYS:
            raise DataError(
                f"unknown key {key!r}", where=place, remedy=f"keys: {', '.join(KEYS)}{_near(str(key), list(KEYS))}"
            )
    kind = raw.get("kind", "prompt")
    if kind not in KINDS:
        raise DataError(f"kind is {kind!r}", where=place, remedy=f"one of {', '.join(KINDS)}")
    if raw.get("chat", "auto") not in ("auto", "never"):
        raise DataError(f"chat is {raw['chat']!r}", where=place, remedy="auto or never")
    wanted = JINJA_OF_KIND[kind]
    sources: dict[str, Any] = {key: raw[key] for key in ("prompt", "plain", "answer", "text") if key in raw}
    allowed = (*wanted, "plain") if kind == "prompt" else wanted
    for key in {*wanted, *sources}:
        if key not in allowed or not isinstance(sources.get(key), str):
            raise DataError(
                f"kind {kind} wants jinja texts {', '.join(allowed) or '(none)'}; look at {key!r}", where=place
            )
    columns = _columns(raw.get("columns"), place)
    _check_jinja(sources, [column.name for column in columns], place)
    roles = raw.get("roles") or {}
    if kind == "messages" and ("messages" not in [column.name for column in columns] or not roles):
        raise DataError("kind messages wants a column messages and a table of roles", where=place)
    return Template(
        name=str(raw.get("name", file.stem)),
        description=str(raw.get("description", "")),
        kind=kind,
        columns=columns,
        chat=raw.get("chat", "auto") == "auto",
        sources=sources,
        roles={str(key): str(value) for key, value in roles.items()},
        example=raw.get("example") or {},
        path=place,
    )


def _columns(raw: Any, place: str) -> tuple[Column, ...]:
    if not isinstance(raw, dict) or not raw:
        raise DataError("columns are missing", where=place, remedy="columns: {name: {required: true}}")
    columns = []
    for name, facts in raw.items():
        facts = {} if facts is None else facts
        if not isinstance(facts, dict) or set(facts) - {"required", "also"}:
            raise DataError(f"column {name!r} may say required and also, nothing else", where=place)
        also = facts.get("also", [])
        if not isinstance(facts.get("required", False), bool) or not isinstance(also, list):
            raise DataError(f"column {name!r}: required is true or false, also is a list of names", where=place)
        columns.append(Column(str(name), facts.get("required", False), tuple(map(str, also))))
    return tuple(columns)


def _check_jinja(sources: Mapping[str, str], columns: list[str], place: str) -> None:
    from jinja2 import TemplateSyntaxError, meta

    environment = _environment()
    for key, source in sources.items():
        try:
            names = meta.find_undeclared_variables(environment.parse(source))
        except TemplateSyntaxError as error:
            raise DataError(f"{key} is not a jinja text: {error.message} (line {error.lineno})", where=place) from error
        unknown = sorted(names - set(columns) - set(environment.globals))
        if unknown:
            what = f"{key} uses {unknown[0]!r}, which is no column of the template{_near(unknown[0], columns)}"
            raise DataError(what, where=place, remedy="declare it under columns")
