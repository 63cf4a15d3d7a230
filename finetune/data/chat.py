"""Rows of messages in the forms people keep them, brought to one: a list of {role, content, ...} and a list of tools.

Role/content and from/value are told apart message by message, so a file may mix them. Roles are mapped by the
template's table; an unknown role stops the run even where bad rows are skipped, since it is a fault of the whole set
and would silently mask everything.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from finetune.data.cells import RowError, check_finite, is_empty, json_cell, kind_of, text_cell

Message = dict[str, Any]
FORMS = (("role", "content"), ("from", "value"))
TEXT_PARTS = ("text", "input_text", "output_text")
"""Types of the parts of a content that are text; a part of another type is refused, whatever text it brings."""
MAY_BE_EMPTY = ("system", "tool")
SECOND_CONTENT = "messages with a content and a value that differ (the one that belongs to their role key is taken)"
STRAY_ARGUMENTS = "tool call arguments that are not a JSON object"


@dataclass(frozen=True)
class Conversation:
    """Messages with roles mapped and contents as text; `trained[i]` is False where message i says so itself."""

    messages: list[Message]
    tools: list[dict[str, Any]] | None
    trained: list[bool]


def conversation(
    cells: Mapping[str, Any], names: Mapping[str, str], roles: Mapping[str, str], where: str, notes: set[str]
) -> Conversation:
    """The row's conversation. `cells` holds `messages` and perhaps `tools`; `names` is what the file calls them.

    Raises RowError naming the row, the message (counted from 1) and the field.
    """
    column = names["messages"]
    found = json_cell(cells.get("messages"), column, where)
    if found is None or (isinstance(found, (list, tuple)) and not len(found)):
        remedy = "write it, or set data.on_bad_row=skip"
        raise RowError(f"column {column!r} is empty", where, reason=f"{column!r} is empty", remedy=remedy)
    if not isinstance(found, (list, tuple)):
        raise RowError(
            f"column {column!r} holds {kind_of(found)}; a list of messages is wanted", where, f"{column!r} is no list"
        )
    messages, trained = [], []
    for number, item in enumerate(found, start=1):
        place = f"{where}, message {number}"
        message = _message(item, roles, place, notes)
        trained.append(_flag(message, place))
        messages.append(message)
    return Conversation(messages, _tools(cells.get("tools"), names.get("tools", "tools"), where), trained)


def with_system(talk: Conversation, system: str, where: str) -> Conversation:
    """The conversation with the system text of the row's own column. RowError where it has another one already."""
    if not system.strip():
        return talk
    first = talk.messages[0]
    if first["role"] == "system":
        if first["content"].strip() == system.strip():
            return talk
        what = "the row has a system column and another system message"
        raise RowError(what, where, reason=what, remedy="keep one of the two")
    messages = [{"role": "system", "content": system}, *talk.messages]
    return Conversation(messages, talk.tools, [True, *talk.trained])


def _message(item: object, roles: Mapping[str, str], place: str, notes: set[str]) -> Message:
    if not isinstance(item, Mapping):
        raise RowError(
            f"a message is {kind_of(item)}; an object with role and content is wanted", place, "a message is no object"
        )
    message = {key: value for key, value in item.items() if value is not None}
    form = next((form for form in FORMS if form[0] in message), None)
    if form is None:
        keys = ", ".join(sorted(map(str, item))) or "none"
        what = f"a message has neither role/content nor from/value (its keys: {keys})"
        raise RowError(what, place, reason="a message has neither role/content nor from/value")
    role_key, content_key = form
    written = message.pop(role_key)
    role = roles.get(written) if isinstance(written, str) else None
    if role is None and not isinstance(written, str):
        what = f"the role is {kind_of(written)}; a name is wanted"
        raise RowError(what, place, reason="a role is no name", remedy="mend it, or set data.on_bad_row=skip")
    if role is None:
        known = ", ".join(roles)
        raise RowError(
            f"unknown role {written!r}",
            place,
            skippable=False,
            remedy=f"known roles: {known}. Others: data.roles.{written}=user (or assistant, system, tool)",
        )
    if role == "call":
        called = json_cell(message.pop(content_key, None), content_key, place)
        message["tool_calls"] = [_as_call(call) for call in (called if isinstance(called, (list, tuple)) else [called])]
        role = "assistant"
    content = _content(message.pop(content_key, None), content_key, place, notes)
    other = next(key for _, key in FORMS if key != content_key)
    if not is_empty(message.get(other)) and message[other] != content:
        notes.add(SECOND_CONTENT)
    calls = _calls(message, place)
    if is_empty(content) and not (role == "assistant" and calls) and role not in MAY_BE_EMPTY:
        what = f"{content_key!r} of the {role} message is empty"
        raise RowError(what, place, reason=what, remedy="write it, or set data.on_bad_row=skip")
    return {"role": role, "content": content, **message}


def _content(value: object, key: str, place: str, notes: set[str]) -> str:
    """Text, or text parts ({type: text, text: ...}) put together in their order."""
    if isinstance(value, (list, tuple)):
        parts = []
        for part in value:
            text = part.get("text") if isinstance(part, Mapping) else part
            kind = part.get("type") if isinstance(part, Mapping) else None
            if not isinstance(text, str) or (kind is not None and kind not in TEXT_PARTS):
                raise RowError(f"{key!r} has a part that is not text", place, reason="a message part is not text")
            parts.append(text)
        return "".join(parts)
    return text_cell(value, key, place, notes)


def _as_call(call: Any) -> Any:
    """{name, arguments} in the form that chat templates know; anything else as it is, for `_calls` to refuse."""
    bare = isinstance(call, Mapping) and "name" in call and "function" not in call
    return {"type": "function", "function": call} if bare else call


def _calls(message: Message, place: str) -> list[Any]:
    """The message's tool calls, arguments given as JSON text parsed (chat templates write them with tojson)."""
    calls = json_cell(message.get("tool_calls"), "tool_calls", place)
    if not calls:
        message.pop("tool_calls", None)
        return []
    if not isinstance(calls, (list, tuple)) or not all(isinstance(call, Mapping) for call in calls):
        raise RowError("tool_calls is no list of objects", place, reason="tool_calls is no list of objects")
    parsed = []
    for call in calls:
        function = call.get("function", call)
        arguments = json_cell(function.get("arguments"), "arguments", place) if isinstance(function, Mapping) else None
        if not isinstance(arguments, Mapping):
            raise RowError(STRAY_ARGUMENTS, place, reason=STRAY_ARGUMENTS)
        check_finite(arguments, "tool call arguments", place)
        function = {**function, "arguments": dict(arguments)}
        parsed.append({**call, "function": function} if "function" in call else function)
    message["tool_calls"] = parsed
    return parsed


def _flag(message: Message, place: str) -> bool:
    """A message's own `train` (true, false) or `weight` (0, 1); taken out, since chat templates do not know them."""
    flags = [message.pop(key) for key in ("train", "weight") if key in message]
    for flag in flags:
        if flag not in (0, 1):
            raise RowError(
                f"a message's train or weight is {flag!r}; 0 or 1 is wanted", place, "a train flag is not 0 or 1"
            )
    return all(flags)


def _tools(value: object, column: str, where: str) -> list[dict[str, Any]] | None:
    """The row's tools: a list, or one as JSON text; an empty one means none."""
    if is_empty(value):
        return None
    tools = json_cell(value, column, where)
    if isinstance(tools, (list, tuple)) and all(isinstance(tool, Mapping) for tool in tools):
        check_finite(tools, "tools", where)
        return [dict(tool) for tool in tools] or None
    kind = kind_of(tools) if not isinstance(tools, (list, tuple)) else "a list with other things than objects"
    what = f"column {column!r} holds {kind}; a list of tools is wanted"
    raise RowError(what, where, reason=f"{column!r} is no list of tools")
