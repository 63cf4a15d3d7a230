"""What a chat template shows of a row: its tools, calls and reasoning, each tried with a word of its own.

That a name stands somewhere in the text says nothing (a user may speak of the tool), so the row is written once more
with words in their place that no text has. A tool or a call that is not shown is refused: the row would teach to call
what was never shown, or to say nothing. Reasoning that is not shown is counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from finetune.errors import DataError

REASONING = ("reasoning_content", "reasoning", "thinking")
DROPPED_REASONING = "assistant reasoning that the chat template leaves out"

Message = dict[str, Any]


@dataclass
class _Words:
    """Words that stand nowhere in a text, and what each stands for."""

    text: str
    needed: dict[str, str] = field(default_factory=dict)
    counted: list[str] = field(default_factory=list)

    def new(self) -> str:
        stem = "qzshown"
        while stem in self.text:
            stem += "q"
        return f"{stem}{len(self.needed) + len(self.counted)}z"

    def need(self, what: str) -> str:
        word = self.new()
        self.needed[word] = what
        return word

    def count(self) -> str:
        word = self.new()
        self.counted.append(word)
        return word


def check_shown(
    write: Callable[[list[Message], Any], str], messages: Sequence[Message], tools: Any, text: str, name: str
) -> set[str]:
    """Notes on what the chat template `name` leaves out of the row whose text is `text`; `write` is its rendering.

    Raises DataError for a tool, a call or a call's arguments that are not shown.
    """
    if not tools and not any(key in message for message in messages for key in (*REASONING, "tool_calls")):
        return set()
    words = _Words(text)
    copies = [_with_words(message, words) for message in messages]
    renamed = [_renamed(tool, words, "the tool") for tool in tools or ()]
    if not words.needed and not words.counted:
        return set()
    written = write(copies, renamed or None)
    for word, what in words.needed.items():
        if word not in written:
            raise DataError(f"the chat template of {name} does not show {what}")
    return {DROPPED_REASONING} if any(word not in written for word in words.counted) else set()


def _with_words(message: Message, words: _Words) -> Message:
    if message["role"] != "assistant":
        return message
    copy = dict(message)
    for key in REASONING:
        if isinstance(copy.get(key), str) and copy[key].strip():
            copy[key] = words.count()
    if copy.get("tool_calls"):
        copy["tool_calls"] = [_called(call, words) for call in copy["tool_calls"]]
    return copy


def _renamed(tool: Mapping[str, Any], words: _Words, kind: str) -> Mapping[str, Any]:
    function = tool.get("function", tool)
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        raise DataError(f"{kind} has no name that a chat template can show")
    function = {**function, "name": words.need(f"{kind} {name!r}")}
    return {**tool, "function": function} if "function" in tool else function


def _called(call: Mapping[str, Any], words: _Words) -> Mapping[str, Any]:
    """The call with another name, and with an argument more, which is shown wherever arguments are."""
    name = call.get("function", call).get("name")
    renamed = _renamed(call, words, "the call of the tool")
    function = renamed.get("function", renamed)
    word = words.need(f"the arguments of the call of the tool {name!r}")
    function = {**function, "arguments": {**function["arguments"], word: word}}
    return {**renamed, "function": function} if "function" in renamed else function


def texts_in(value: Any) -> Iterator[str]:
    """Every text inside a value: keys and values of objects, items of lists."""
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, str):
            yield item
        elif isinstance(item, Mapping):
            waiting += [*item.keys(), *item.values()]
        elif isinstance(item, (list, tuple)):
            waiting += item


def veiled(value: Any, stop: str) -> Any:
    """The value with every `stop` inside its texts written over by a text of the same length."""
    if isinstance(value, str):
        return value.replace(stop, "q" * len(stop))
    if isinstance(value, Mapping):
        return {veiled(key, stop): veiled(item, stop) for key, item in value.items()}
    return [veiled(item, stop) for item in value] if isinstance(value, (list, tuple)) else value
