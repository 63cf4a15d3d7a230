"""Jinja that cannot harm: a template of an unknown person may waste neither memory nor time, nor reach any object.

Jinja's own sandbox keeps attributes and calls away, but lets a template fill the memory or run for ever. Here filters and
methods are those of a short list, operators and joins are bounded, and one meter for each rendering counts the turns of
loops and macros, the characters and parts that anything in the template makes, and the time: the template's tree is
given calls of the meter where jinja has no place for one. What was made and let go is counted too, which is more than
the memory held, and simple.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from jinja2 import StrictUndefined, Undefined, nodes, pass_context
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
MOST_MADE, MOST_PARTS_MADE = 2**28, 4_000_000
"""Characters, and parts of lists, that all operators, filters and calls of one rendering may make together."""
LARGEST_NUMBER = 2**256
FILTERS = (
    "abs", "capitalize", "count", "d", "default", "dictsort", "first", "float", "int", "items", "last", "length", "list",
    "lower", "map", "max", "min", "reject", "rejectattr", "reverse", "select", "selectattr", "sort", "title",
    "trim", "unique", "upper", "wordcount",
)  # fmt: skip
"""Filters that are jinja's own; join, replace, round, string and tojson are ours."""
REFERRING = ("d", "default", "first", "last", "max", "min")
"""Filters that make nothing: they hand on a value that is there."""
WHOLE = (*REFERRING, "capitalize", "count", "float", "int", "length", "lower", "replace", "reverse", "string", "tojson",
         "trim", "upper")  # fmt: skip
"""Filters that take a text as one value; the others make a list of its characters or words."""
SPLITTING = ("rsplit", "split", "splitlines")
METHODS = (
    "append", "capitalize", "copy", "count", "endswith", "find", "get", "index", "isalnum", "isalpha", "isdigit",
    "isnumeric", "isspace", "items", "keys", "lower", "lstrip", "pop", "removeprefix", "removesuffix", "rfind", "rindex",
    "rsplit", "rstrip", "split", "splitlines", "startswith", "strip", "title", "upper", "values",
)  # fmt: skip
OURS = "_finetune_"
METER, TURN, TURNED, JOIN, KEEP, MADE = (
    OURS + name for name in ("meter", "turn", "turned", "join", "keep", "made")
)  # fmt: skip


class TemplateLimitError(SecurityError):
    """A template that goes over a bound of this file."""


class Meter:
    """Counts what one rendering does, and ends it when there is too much of it or it takes too long."""

    def __init__(self) -> None:
        self.turns = self.characters = self.parts = 0
        self.until = time.monotonic() + SECONDS

    def spend(self, characters: int = 0, parts: int = 0) -> None:
        """Adds to what was made, and looks at the clock."""
        self.characters += characters
        self.parts += parts
        if self.characters > MOST_MADE:
            raise TemplateLimitError(f"the template makes texts of more than {MOST_MADE:,} characters together")
        if self.parts > MOST_PARTS_MADE:
            raise TemplateLimitError(f"the template makes lists of more than {MOST_PARTS_MADE:,} parts together")
        if time.monotonic() > self.until:
            raise TemplateLimitError(f"the template takes longer than {SECONDS:g} seconds")

    def turn(self, characters: int = 0) -> str:
        """Called once in every turn of a loop and every call of a macro, with the text in it; writes nothing."""
        self.turns += 1
        if self.turns > MOST_TURNS:
            raise TemplateLimitError(f"the template takes more than {MOST_TURNS:,} turns of its loops")
        self.spend(characters)
        return ""

    def turned(self, value: Any) -> Any:
        """The value of a loop's condition; a turn that it leaves out is one too."""
        self.turn()
        return value

    def made(self, value: Any) -> Any:
        """The value, counted: the characters of a text, the parts of a list; what makes its parts later counts them."""
        if isinstance(value, str):
            self.spend(len(value))
        elif isinstance(value, (list, tuple, set, frozenset, dict)):
            self.spend(0, len(value))
        elif isinstance(value, Iterator):
            return self._drawn(value)
        else:
            if isinstance(value, int) and abs(value) > LARGEST_NUMBER:
                raise TemplateLimitError("the template makes too large a number")
            self.spend()
        return value

    def _drawn(self, values: Iterable[Any]) -> Iterator[Any]:
        for value in values:
            self.spend(len(value) if isinstance(value, str) else 0, 1)
            yield value

    def keep(self, value: Any) -> Any:
        return self.made(kept(value))

    def join(self, values: Any) -> str:
        return str(self.made(bounded_join(values)))


def _meter(context: Any) -> Meter:
    meter = context.parent[METER]
    assert isinstance(meter, Meter)
    return meter


@pass_context
def _written(context: Any, value: Any) -> str:
    """The text of an output; blocks and macros put outputs together before anything else can count them."""
    text = str(kept(value))
    _meter(context).spend(len(text))
    return text


def _metered(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The filter, its result counted."""
    wanted = getattr(getattr(function, "jinja_pass_arg", None), "name", "")

    @pass_context
    def filtered(context: Any, value: Any, *arguments: Any, **named: Any) -> Any:
        if name not in WHOLE and isinstance(value, str):
            _few(len(value))
        given = {"": (), "context": (context,), "eval_context": (context.eval_ctx,)}
        first = given.get(wanted, (context.environment,))
        result = function(*first, value, *arguments, **named)
        meter = _meter(context)
        if name in REFERRING:
            meter.spend()
            return result
        return meter.made(result)

    return filtered


class SafeEnvironment(ImmutableSandboxedEnvironment):
    """Jinja with bounds. Texts are compiled with `compiled` and written with `write`."""

    intercepted_binops = frozenset(("+", "-", "*", "/", "//", "%", "**"))

    def __init__(self, chat: bool = False) -> None:
        """`chat`: with the settings under which transformers writes chat templates."""
        super().__init__(
            undefined=Undefined if chat else StrictUndefined,
            trim_blocks=chat,
            lstrip_blocks=chat,
            keep_trailing_newline=not chat,
            autoescape=False,
            optimized=False,
            finalize=_written,
            extensions=["jinja2.ext.loopcontrols"],
        )
        own = {
            "join": bounded_join, "replace": bounded_replace, "round": bounded_round, "string": bounded_text,
            "tojson": plain_json,
        }  # fmt: skip
        filters: dict[str, Callable[..., Any]] = {name: self.filters[name] for name in FILTERS} | own
        self.filters = {name: _metered(name, function) for name, function in filters.items()}
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
        return _meter(context).made(super().call_binop(context, operator, left, right))

    def call(self, context: Any, called: Any, /, *arguments: Any, **named: Any) -> Any:
        owner = getattr(called, "__self__", None)
        if isinstance(owner, Meter):
            return called(*arguments)
        meter = _meter(context)
        if isinstance(owner, str):
            if called.__name__ in SPLITTING:
                by = arguments[0] if arguments else named.get("sep")
                _few(owner.count(by) if isinstance(by, str) and by else len(owner))
                meter.spend(len(owner))
            meter.spend()
        return meter.made(super().call(context, called, *arguments, **named))

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
        if OURS in source:
            raise TemplateLimitError(f"names that begin with {OURS} are not for templates")
        try:
            return self.from_string(counted(self.parse(source)))
        except (SyntaxError, RecursionError, MemoryError) as error:
            # Python's own compiler has bounds of nesting, which a template of jinja can go over.
            raise TemplateLimitError("the template is nested too deeply") from error
        except ValueError as error:
            raise TemplateLimitError(f"the template cannot be compiled: {error}") from error


def counted(tree: nodes.Template) -> nodes.Template:
    """The tree with a call of the meter at the head of each loop and macro, and bounded joins (~), lists and mappings."""
    _bound_parts(tree)
    turning: list[nodes.For | nodes.Macro | nodes.CallBlock] = [
        *tree.find_all(nodes.For),
        *tree.find_all(nodes.Macro),
        *tree.find_all(nodes.CallBlock),
    ]
    for node in turning:
        length = sum(len(text.data) for part in node.body for text in part.find_all(nodes.TemplateData))
        node.body = [nodes.Output([_call(TURN, [nodes.Const(length)])]), *node.body]
        if isinstance(node, nodes.For) and node.test is not None:
            node.test = _call(TURNED, [node.test])
    for block in tree.find_all(nodes.AssignBlock):
        block.filter = nodes.Filter(block.filter, "string", [], [], None, None)
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
    if isinstance(value, (nodes.Compare, nodes.Test)) or (
        isinstance(value, nodes.Getitem) and isinstance(value.arg, nodes.Slice)
    ):
        return _call(MADE, [value])
    return value


def _call(name: str, arguments: list[Any]) -> nodes.Call:
    return nodes.Call(nodes.Name(name, "load"), arguments, [], None, None)


def write(template: Any, values: Mapping[str, Any]) -> str:
    """What the template writes with these values. Raises whatever it raises, and TemplateLimitError beyond the bounds."""
    length, pieces, meter = 0, [], Meter()
    ours = {
        METER: meter, TURN: meter.turn, TURNED: meter.turned, JOIN: meter.join, KEEP: meter.keep, MADE: meter.made,
    }  # fmt: skip
    # As `generate`, which puts the globals into each context one by one by way of a chain of mappings.
    context = template.new_context({**template.environment.globals, **values, **ours}, shared=True)
    for piece in template.root_render_func(context):
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


def _few(parts: int) -> None:
    """Raises TemplateLimitError for a list that would have this many parts."""
    if parts > MOST_PARTS:
        raise TemplateLimitError(f"the template makes a list of more than {MOST_PARTS:,} parts")


def bounded_join(values: Any, d: str = "", attribute: str | None = None) -> str:
    """jinja's join: texts with `d` between them; `attribute` names the item of each value to take."""
    pieces: list[str] = []
    length = 0
    for value in values:
        pieces.append(str(kept(value[attribute] if attribute is not None else value)))
        length += len(pieces[-1]) + len(d)
        bound(length)
    return d.join(pieces)


def bounded_round(value: Any, precision: int = 0, method: str = "common") -> Any:
    """jinja's round."""
    from jinja2.filters import do_round

    if not abs(precision) <= 16:
        raise TemplateLimitError("round takes at most 16 digits")
    rounded: Any = do_round
    return rounded(value, precision, method)


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
    if indent is None:
        return json.dumps(kept(value), ensure_ascii=False)
    length, pieces = 0, []
    for piece in json.JSONEncoder(ensure_ascii=False, indent=indent).iterencode(kept(value)):
        length += len(piece)
        bound(length)
        pieces.append(piece)
    return "".join(pieces)


def names_in(source: str) -> set[str]:
    """The variables that a text uses and does not set itself."""
    from jinja2 import meta

    return meta.find_undeclared_variables(SafeEnvironment().parse(source))


def refusal(message: str) -> None:
    """`raise_exception` of chat templates."""
    from jinja2 import TemplateError

    raise TemplateError(message)


def write_chat(compiled: Any, messages: Sequence[Mapping[str, Any]], prompt: bool = False, **values: Any) -> str:
    """A chat template's text under the bounds of this file; `compiled` by `SafeEnvironment(chat=True)`.

    `values`: what else it is given, as tools and the special tokens by name.
    """
    given = {"bos_token": "", "eos_token": "", "raise_exception": refusal, "tools": None, "documents": None, **values}
    return write(compiled, {**given, "messages": messages, "add_generation_prompt": prompt})
