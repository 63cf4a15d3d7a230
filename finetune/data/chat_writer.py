"""A tokenizer's chat template, written: as transformers writes it, with less work around it, or under bounds.

`apply_chat_template` copies and looks through every conversation for types that a data file does not have, which takes as
long as the template itself. Where every field is plain text and there are no tools, the template that transformers compiled
is written directly, once it has been seen to give the same text. Everything else goes the long way. A template that came
in a data template's file is an unknown person's: each row is then written under the sandbox's bounds, and the first
conversation of each order of roles is compared with transformers' text, since that is what will be saved and served.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jinja2 import TemplateError

from finetune.data.chat import Message
from finetune.data.sandbox import SafeEnvironment, write_chat
from finetune.data.shown import REASONING
from finetune.errors import DataError

RENAMED = frozenset(REASONING)


class ChatWriter:
    """Writes conversations with one tokenizer's chat template. `bounded`: under the sandbox's bounds, row for row."""

    def __init__(self, tokenizer: Any, bounded: bool) -> None:
        self._tokenizer, self._bounded = tokenizer, bounded
        self._compiled: dict[str, Any] = {}
        self._safe: dict[str, Any] = {}
        self._same: set[tuple[str, ...]] = set()

    def text(self, messages: Sequence[Message], tools: Any, prompt: bool) -> str:
        """The text. Raises whatever the template raises, and TemplateLimitError beyond the bounds."""
        source = str(self._tokenizer.get_chat_template(tools=tools))
        plain = not tools and all(map(_is_plain, messages))
        if self._bounded:
            return self._within_bounds(source, messages, tools, prompt, plain)
        if not plain or not messages:
            return self._long_way(messages, tools, prompt)
        if source not in self._compiled:
            self._compiled[source] = self._direct(source, messages, prompt)
        compiled = self._compiled[source]
        if compiled is None:
            return self._long_way(messages, tools, prompt)
        return self._written(compiled, messages, prompt)

    def _long_way(self, messages: Sequence[Message], tools: Any, prompt: bool) -> str:
        return str(
            self._tokenizer.apply_chat_template(
                list(messages), tools=tools, tokenize=False, add_generation_prompt=prompt
            )
        )

    def _written(self, compiled: Any, messages: Sequence[Message], prompt: bool) -> str:
        template, shared = compiled
        given = {"messages": messages, "tools": None, "documents": None, "add_generation_prompt": prompt}
        context = template.new_context({**shared, **given, **self._tokenizer.special_tokens_map}, shared=True)
        return "".join(template.root_render_func(context))

    def _direct(self, source: str, messages: Sequence[Message], prompt: bool) -> Any:
        """transformers' compiled template and its globals; None where this release has none to give, or it writes otherwise."""
        from transformers.utils import chat_template_utils

        compiles = getattr(chat_template_utils, "_compile_jinja_template", None)
        expected = self._long_way(messages, None, prompt)
        try:
            template = compiles(source) if compiles else None
            compiled = template and (template, dict(template.globals))
            return compiled if compiled and self._written(compiled, messages, prompt) == expected else None
        except (TypeError, AttributeError, TemplateError):
            # The long way has just written it, so that the short way fails only means that this release has none.
            return None

    def _within_bounds(self, source: str, messages: Sequence[Message], tools: Any, prompt: bool, plain: bool) -> str:
        if source not in self._safe:
            self._safe[source] = SafeEnvironment(chat=True).compiled(source)
        special = self._tokenizer.special_tokens_map
        text = write_chat(self._safe[source], messages, prompt, tools=tools or None, **special)
        if not plain:
            return self._long_way(messages, tools, prompt)  # what is given then has other forms of the same fields
        shape = (source, str(prompt), *(message["role"] for message in messages))
        if shape not in self._same:
            if text != self._long_way(messages, tools, prompt):
                raise DataError("it writes another text under the bounds of data templates than without them")
            self._same.add(shape)
        return text


def _is_plain(message: Message) -> bool:
    """Whether every field is a text, and none is one that transformers also gives under other names."""
    return {*map(type, message.values())} == {str} and RENAMED.isdisjoint(message)
