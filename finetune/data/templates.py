"""Templates: the YAML files that say how a record becomes text and which part of it is learned.

A template is one YAML file: columns, and either a prompt and an answer (jinja, sandboxed), or `kind: messages`, or
`kind: text`. Where the tokenizer has a chat template, a prompt is asked as the user turn and the answer is the
assistant turn (`chat: never` turns that off), since the model will be asked in that form; otherwise both are plain.
`kind: messages` may bring a chat template of its own, for a base model that has none.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from finetune.environment import shipped_folder, user_path
from finetune.errors import DataError

KINDS = ("prompt", "messages", "text")
KEYS = (
    "name", "description", "kind", "columns", "chat", "prompt", "plain", "answer", "text", "roles", "chat_template",
    "tokens", "example",
)  # fmt: skip
ROLES = ("system", "user", "assistant", "tool", "call")
"""What a name in a file may be mapped to. `call`: an assistant's turn whose content is JSON of the tools that it calls."""
SYSTEM = "system"
"""The optional column of a row's system text: a system turn, or, without a chat template, a paragraph before the prompt."""
LARGEST_FILE = 2**20
DEEPEST_YAML = 50
PROBE = ({"role": "user", "content": "question"}, {"role": "assistant", "content": "answer"})
JINJA_OF_KIND = {"prompt": ("prompt", "answer"), "messages": (), "text": ("text",)}
"""Kind of template: the jinja texts that it must give. A prompt template may also give `plain`."""


@dataclass(frozen=True)
class Column:
    """A template's column. `also` are other names that files use for it, tried in order when its own is absent."""

    name: str
    required: bool
    also: tuple[str, ...] = ()


@dataclass(frozen=True)
class Template:
    """One template file, read. `mapping` names the file's column for a template column (`data.columns`).

    `chat_template` is its own chat template ('': the tokenizer's is used), and `tokens` those that it needs whole.
    """

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
    chat_template: str = ""
    tokens: tuple[str, ...] = ()

    @cached_property
    def texts(self) -> dict[str, Any]:
        """The compiled jinja texts by key."""
        from finetune.data.sandbox import SafeEnvironment

        environment = SafeEnvironment()
        return {key: environment.compiled(source) for key, source in self.sources.items()}

    @property
    def required(self) -> list[str]:
        return [column.name for column in self.columns if column.required]

    @property
    def takes_system(self) -> bool:
        """Whether rows may bring a system text, in a column of its own."""
        return any(column.name == SYSTEM for column in self.columns)

    def columns_of(self, key: str) -> list[str]:
        """The columns that the jinja text `key` uses, in the template's order."""
        from finetune.data.sandbox import names_in

        names = names_in(self.sources[key])
        return [column.name for column in self.columns if column.name in names]

    def asked_column(self, key: str) -> str:
        """The one column that a single text can stand for in the prompt `key`. DataError where it takes several."""
        used = self.columns_of(key)
        needed = [name for name in used if name in self.required] or used[:1]
        if len(needed) != 1:
            what = f"its prompt is made from {', '.join(needed) or 'no column'}, and one text is given"
            raise DataError(what, self.path, "ask with a template whose prompt needs one column: data.template=PATH")
        return needed[0]

    def mapped(self, mapping: Mapping[str, str]) -> Template:
        """The same template reading other columns. DataError for a column that the template does not have."""
        names = [column.name for column in self.columns]
        for name in mapping:
            if name not in names:
                where, remedy = (
                    f"data.columns.{name}",
                    f"columns of {self.name}: {', '.join(names)}{nearest(name, names)}",
                )
                raise DataError(f"the template {self.name!r} has no column {name!r}", where=where, remedy=remedy)
        return replace(self, mapping=dict(mapping))

    def doubled(self) -> list[str]:
        """Warnings of `data.columns`: a column of the file that two columns of the template take."""
        taken = {column.name: self.mapping.get(column.name, column.name) for column in self.columns}
        found = []
        for name in dict.fromkeys(self.mapping.values()):
            own = [column for column, source in taken.items() if source == name]
            if len(own) > 1:
                found.append(f"data.columns: the column {name!r} is taken as {' and as '.join(own)}")
        return found

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


def nearest(name: str, names: list[str]) -> str:
    """The name most like `name`, as a remark to end a message with; empty when none is near."""
    lower = {str(other).lower(): str(other) for other in names}
    near = difflib.get_close_matches(name.lower(), lower, n=1, cutoff=0.5)
    return f"; nearest: {lower[near[0]]!r}" if near else ""


def template_names() -> list[str]:
    """Names of the templates in ./data_templates and of those that come with the program."""
    return sorted({file.stem for folder in _folders() for file in folder.glob("*.yaml")})


def _folders() -> list[Path]:
    """Where templates are looked up by name: the user's own first."""
    return [Path("data_templates"), shipped_folder("data_templates")]


def find_template(name: str) -> Path | None:
    """The file of a template that is looked up by name."""
    return next((file for folder in _folders() if (file := folder / f"{name}.yaml").is_file()), None)


def load_template(name: str) -> Template:
    """A template by its name, or from a YAML file of the user's own. DataError names the file and the key at fault."""
    own = user_path(name, "data.template")
    if own.suffix in (".yaml", ".yml") or len(own.parts) > 1:
        if not own.is_file():
            raise DataError("no such template file", where=f"data.template={name}", remedy="check the path")
        return _read(own)
    file = find_template(name)
    if file is not None:
        return _read(file)
    names = template_names()
    remedy = f"templates: {', '.join(names)}{nearest(name, names)}; or give the path of a YAML file"
    raise DataError(f"there is no template {name!r}", where="data.template", remedy=remedy)


def _read(file: Path) -> Template:
    import yaml

    try:
        if file.stat().st_size > LARGEST_FILE:
            raise ValueError(f"more than {LARGEST_FILE:,} bytes")
        text = file.read_text(encoding="utf-8")
        _check_yaml(text)
        raw, twice = yaml.safe_load(text), _given_twice(yaml.compose(text, Loader=yaml.SafeLoader))
    except (yaml.YAMLError, ValueError, RecursionError, OSError) as error:
        reason = " ".join(str(error).split())
        raise DataError(
            f"not a readable YAML file: {reason}", where=str(file), remedy="see data_templates/alpaca.yaml"
        ) from error
    if twice:
        raise DataError(f"the key {twice!r} is given twice", where=str(file), remedy="keep one")
    if not isinstance(raw, dict):
        raise DataError("a template is a mapping of keys", where=str(file), remedy="see data_templates/alpaca.yaml")
    return _checked(raw, file)


def _check_yaml(text: str) -> None:
    """Raises ValueError for YAML with anchors, or so deep that reading it takes long; only as much is read as it takes."""
    import yaml

    depth = 0
    for token in yaml.scan(text):
        if isinstance(token, (yaml.AliasToken, yaml.AnchorToken)):
            raise ValueError("anchors and aliases (&, *) are not read in a template; write the text out")
        kind = type(token).__name__
        if kind.startswith(("Block", "Flow")):
            depth += kind.endswith("StartToken") - kind.endswith("EndToken")
        if depth > DEEPEST_YAML:
            raise ValueError(f"nested more than {DEEPEST_YAML} deep")


def _given_twice(node: Any) -> str | None:
    """A key that a mapping of YAML holds twice: YAML would keep the last without a word. Keys of `example` too."""
    kind = getattr(node, "id", "")
    if kind == "mapping":
        seen: set[str] = set()
        for key, _ in node.value:
            if str(key.value) in seen:
                return str(key.value)
            seen.add(str(key.value))
    inner = [value for _, value in node.value] if kind == "mapping" else node.value if kind == "sequence" else []
    return next((found for value in inner if (found := _given_twice(value))), None)


def _checked(raw: dict[str, Any], file: Path) -> Template:
    """The template of a parsed YAML; every key is known, and every jinja text uses columns that it declares."""
    place = str(file)
    for key in raw:
        if key not in KEYS:
            raise DataError(
                f"unknown key {key!r}", where=place, remedy=f"keys: {', '.join(KEYS)}{nearest(str(key), list(KEYS))}"
            )
    kind = raw.get("kind", "prompt")
    if kind not in KINDS:
        raise DataError(f"kind is {kind!r}", where=place, remedy=f"one of {', '.join(KINDS)}")
    if raw.get("chat", "auto") not in ("auto", "never"):
        raise DataError(f"chat is {raw['chat']!r}", where=place, remedy="auto or never")
    wanted = JINJA_OF_KIND[kind]
    sources: dict[str, Any] = {key: raw[key] for key in ("prompt", "plain", "answer", "text") if key in raw}
    allowed = (*wanted, "plain") if kind == "prompt" else wanted
    for key in sorted({*wanted, *sources}):
        if key not in allowed or not isinstance(sources.get(key), str):
            raise DataError(
                f"kind {kind} wants jinja texts {', '.join(allowed) or '(none)'}; look at {key!r}", where=place
            )
    columns = _columns(raw.get("columns"), place)
    _check_jinja(sources, [column.name for column in columns], place)
    roles = _roles(raw.get("roles") or {}, place)
    if kind == "messages" and ("messages" not in [column.name for column in columns] or not roles):
        raise DataError("kind messages wants a column messages and a table of roles", where=place)
    return Template(
        name=str(raw.get("name", file.stem)),
        description=str(raw.get("description", "")),
        kind=kind,
        columns=columns,
        chat=raw.get("chat", "auto") == "auto",
        sources=sources,
        roles=roles,
        example=raw.get("example") or {},
        path=place,
        chat_template=_own_chat(raw, kind, place),
        tokens=tuple(map(str, raw.get("tokens") or ())),
    )


def _roles(roles: Any, place: str) -> dict[str, str]:
    if not isinstance(roles, dict):
        raise DataError("roles is not a table of roles", where=place, remedy="roles: {name in the file: role}")
    for name, role in roles.items():
        if role not in ROLES:
            raise DataError(f"roles.{name} is {role!r}", where=place, remedy=f"one of {', '.join(ROLES)}")
    return {str(name): role for name, role in roles.items()}


def _own_chat(raw: dict[str, Any], kind: str, place: str) -> str:
    """The template's own chat template, tried on one conversation under the sandbox's bounds; '' when it has none."""
    from finetune.data.sandbox import SafeEnvironment, write_chat

    source, tokens = raw.get("chat_template", ""), raw.get("tokens")
    if not isinstance(source, str) or (source and kind != "messages"):
        raise DataError("chat_template is a jinja text of kind messages", where=place)
    if tokens is not None and not (source and isinstance(tokens, list)):
        raise DataError("tokens is a list of tokens that chat_template writes", where=place)
    if source:
        try:
            compiled = SafeEnvironment(chat=True).compiled(source)
            texts = [write_chat(compiled, PROBE), write_chat(compiled, PROBE[:1], prompt=True)]
        except Exception as error:
            # A template is a program of the user's: whatever it raises is a fault of the template.
            reason = (str(error) or type(error).__name__).splitlines()[0]
            raise DataError(f"chat_template cannot be written: {reason}", where=place) from error
        if PROBE[1]["content"] not in texts[0] or PROBE[0]["content"] not in texts[1]:
            raise DataError("chat_template does not show a message's content", where=place)
    return source


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
    from jinja2 import TemplateError, TemplateSyntaxError

    from finetune.data.sandbox import SafeEnvironment, names_in

    environment = SafeEnvironment()
    for key, source in sources.items():
        try:
            environment.compiled(source)
            names = names_in(source)
        except TemplateSyntaxError as error:
            raise DataError(f"{key} is not a jinja text: {error.message} (line {error.lineno})", where=place) from error
        except (TemplateError, RecursionError) as error:
            raise DataError(f"{key} is not a jinja text: {error}", where=place) from error
        unknown = sorted(names - set(columns) - set(environment.globals))
        if unknown:
            what = f"{key} uses {unknown[0]!r}, which is no column of the template{nearest(unknown[0], columns)}"
            raise DataError(what, where=place, remedy="declare it under columns")
