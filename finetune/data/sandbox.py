"""Jinja that cannot harm: a template of an unknown person may waste neither memory nor time, nor reach any object.

Jinja's own sandbox keeps attributes and calls away, but lets a template fill the memory or run for ever. Here filters and
methods are those of a short list (none of them can make much from little), operators and joins are bounded, and every
turn of a loop or a macro is counted: the template's tree is given a call of the counter at those places.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import StrictUndefined, Undefined, nodes
from jinja2.exceptions import SecurityError
from jinja2.sandbox import ImmutableSandboxedEnvironment

LONGEST_SOURCE = 100_000
LARGEST_TEXT = 64 * 2**20
"""Characters that a template may write, and that one operator or join may make."""
MOST_TURNS = 1_000_000
"""Turns of all loops and calls of all macros of one rendering."""
SECONDS = 10.0
MOST_PARTS = 1_000_000
"""Values inside one another that a list or a mapping may have, counted as often as they would be written."""
LARGEST_NUMBER = 2**256
FILTERS = (
    "abs", "capitalize", "count", "d", "default", "dictsort", "first", "float", "int", "items", "last", "length", "list",
    "lower", "map", "max", "min", "reject", "rejectattr", "reverse", "round", "select", "selectattr", "sort", "title",
    "trim", "unique", "upper", "wordcount",
)  # fmt: skip
"""Filters that are jinja's own; join, replace, string and tojson are ours."""
METHODS = (
    "append", "capitalize", "copy", "count", "endswith", "find", "get", "index", "isalnum", "isalpha", "isdigit",
    "isnumeric", "isspace", "items", "keys", "lower", "lstrip", "pop", "removeprefix", "removesuffix", "rfind", "rindex",
    "rsplit", "rstrip", "split", "splitlines", "startswith", "strip", "title", "upper", "values",
)  # fmt: skip
TURN, JOIN, KEEP = "_finetune_turn", "_finetune_join", "_finetune_keep"


class TemplateLimitError(SecurityError):
    """A template that goes over a bound of this file."""


class Meter:
    """Counts the turns of one rendering, and ends it when there are too many or it takes too long."""

    def __init__(self) -> None:
        self.turns = 0
        self.until = time.monotonic() + SECONDS

    def turn(self) -> str:
        """Called once in every turn of a loop and every call of a macro; writes nothing."""
        self.turns += 1
        if self.turns > MOST_TURNS:
            raise TemplateLimitError(f"the template takes more than {MOST_TURNS:,} turns of its loops")
        if time.monotonic() > self.until:
            raise TemplateLimitError(f"the template takes longer than {SECONDS:g} seconds")
        return ""


class SafeEnvironment(ImmutableSandboxedEnvironment):
    """Jinja with bounds. Texts are compiled with `compiled` and written with `write`."""

    intercepted_binops = frozenset(("+", "-", "*", "/", "//", "%", "**"))

    def __init__(self, chat: bool = False) -> None:
        """`chat`: with the settings under which transformers writes chat templates."""
        super().__init__(
            undefined=Undefined if chat else StrictUndefined,
            trim_blocks=chat,
            lstrip_blocks=chat,
            keep_trailing_newline=True,
            autoescape=False,
            optimized=False,
            finalize=kept,
            extensions=["jinja2.ext.loopcontrols"],
        )
        own = {"join": bounded_join, "replace": bounded_replace, "string": bounded_text, "tojson": plain_json}
        self.filters = {name: self.filters[name] for name in FILTERS} | own
        self.globals = {name: self.globals[name] for name in ("range", "namespace")}

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            for text, times in ((left, right), (right, left)):
                if isinstance(text, str) and isinstance(times, int):
                    bound(len(text) * max(times, 0))
                elif isinstance(text, (list, tuple)):
                    raise TemplateLimitError("a list cannot be multiplied in a template")
        if operator == "+" and isinstance(left, (str, list, tuple)) and isinstance(right, (str, list, tuple)):
            kept([left, right])
        if operator == "%" and isinstance(left, (str, bytes)):
            raise TemplateLimitError("text formatting with % is not allowed in a template")
        if operator == "**" and not (abs(left) <= 2**16 and abs(right) <= 16):
            raise TemplateLimitError("the template makes too large a number")
        made = super().call_binop(context, operator, left, right)
        if isinstance(made, int) and abs(made) > LARGEST_NUMBER:
            raise TemplateLimitError("the template makes too large a number")
        return made

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if callable(value) and isinstance(obj, (str, bytes, int, float, list, tuple, Mapping)):
            return attr in METHODS and super().is_safe_attribute(obj, attr, value)
        return super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> None:
        """str.format is a method like any other that is not in METHODS: refused."""

    def compiled(self, source: str) -> Any:
        """The compiled text. Raises jinja2.TemplateError (a syntax error, an unknown filter), or TemplateLimitError."""
        if len(source) > LONGEST_SOURCE:
            raise TemplateLimitError(f"a template of {len(source):,} characters; at most {LONGEST_SOURCE:,} are read")
        return self.from_string(counted(self.parse(source)))


def counted(tree: nodes.Template) -> nodes.Template:
    """The tree with a call of the counter at the head of each loop and macro, and bounded joins (~), lists and mappings."""
    turning: list[nodes.For | nodes.Macro | nodes.CallBlock] = [
        *tree.find_all(nodes.For),
        *tree.find_all(nodes.Macro),
        *tree.find_all(nodes.CallBlock),
    ]
    for node in turning:
        node.body = [nodes.Output([_call(TURN, [])]), *node.body]
    _bound_parts(tree)
    for part in tree.find_all(nodes.Node):
        part.environment = tree.environment
    return tree


def _bound_parts(node: nodes.Node) -> None:
    for name, value in node.iter_fields():
        if isinstance(value, list):
            setattr(node, name, [_bounded(item) for item in value])
        elif isinstance(value, nodes.Node):
            setattr(node, name, _bounded(value))


def _bounded(value: Any) -> Any:
    if not isinstance(value, nodes.Node):
        return value
    _bound_parts(value)
    if isinstance(value, nodes.Concat):
        return _call(JOIN, [nodes.List(value.nodes)])
    if isinstance(value, (nodes.List, nodes.Dict)) or (isinstance(value, nodes.Tuple) and value.ctx == "load"):
        return _call(KEEP, [value])
    return value


def _call(name: str, arguments: list[nodes.Expr]) -> nodes.Call:
    return nodes.Call(nodes.Name(name, "load"), arguments, [], None, None)


def write(template: Any, values: Mapping[str, Any]) -> str:
    """What the template writes with these values. Raises whatever it raises, and TemplateLimitError beyond the bounds."""
    length, pieces = 0, []
    for piece in template.generate({**values, TURN: Meter().turn, JOIN: bounded_join, KEEP: kept}):
        length += len(piece)
        bound(length)
        pieces.append(piece)
    return "".join(pieces)


def kept(value: Any) -> Any:
    """The value as it is. TemplateLimitError when writing it would take too much; so nothing can double for ever."""
    if isinstance(value, str):
        bound(len(value))
        return value
    parts, length, waiting = 0, 0, [value]
    while waiting:
        item = waiting.pop()
        parts += 1
        if isinstance(item, str):
            length += len(item)
        elif isinstance(item, Mapping):
            waiting += [*item.keys(), *item.values()]
        elif isinstance(item, (list, tuple, set, frozenset)):
            waiting += item
        elif item is not None and not isinstance(item, (bool, int, float, Undefined)):
            raise TemplateLimitError(f"a {type(item).__name__} cannot be written by a template")
        if parts + len(waiting) > MOST_PARTS:
            raise TemplateLimitError(f"the template makes a list of more than {MOST_PARTS:,} parts")
    bound(length)
    return value


def bound(length: int) -> None:
    """Raises TemplateLimitError for a text (or a list) that would be this long."""
    if length > LARGEST_TEXT:
        raise TemplateLimitError(f"the template makes a text of more than {LARGEST_TEXT:,} characters")


def bounded_join(values: Any, d: str = "", attribute: str | None = None) -> str:
    """jinja's join: texts with `d` between them; `attribute` names the item of each value to take."""
    pieces = [str(kept(value[attribute] if attribute is not None else value)) for value in values]
    bound(sum(map(len, pieces)) + len(d) * len(pieces))
    return d.join(pieces)


def bounded_replace(text: Any, old: str, new: str, count: int | None = None) -> str:
    """jinja's replace."""
    text = str(kept(text))
    if old == "":
        raise TemplateLimitError("replace wants a text to look for")
    bound(len(text) + text.count(old) * len(new))
    return text.replace(old, new, -1 if count is None else count)


def bounded_text(value: Any) -> str:
    """jinja's string."""
    return str(kept(value))


def plain_json(value: Any, indent: int | None = None, **_: Any) -> str:
    """JSON as chat templates write it: not escaped for HTML."""
    if indent is not None and not 0 <= indent <= 8:
        raise TemplateLimitError("tojson indents by at most 8")
    return json.dumps(kept(value), ensure_ascii=False, indent=indent)


def names_in(source: str) -> set[str]:
    """The variables that a text uses and does not set itself."""
    from jinja2 import meta

    return meta.find_undeclared_variables(SafeEnvironment().parse(source))


def refusal(message: str) -> None:
    """`raise_exception` of chat templates."""
    from jinja2 import TemplateError

    raise TemplateError(message)


def write_chat(source: str, messages: Sequence[Mapping[str, Any]], prompt: bool = False) -> str:
    """A chat template's text under the bounds of this file, as a check of the template."""
    values = {"bos_token": "", "eos_token": "", "raise_exception": refusal, "tools": None}
    return write(
        SafeEnvironment(chat=True).compiled(source), {**values, "messages": messages, "add_generation_prompt": prompt}
    )
