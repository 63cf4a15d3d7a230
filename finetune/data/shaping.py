"""What a recipe changes in rows while they are read: names of roles (data.roles), and a system text (data.system).

Both are a rename or a default, so they are made on the records, and everything below sees ordinary rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from finetune.config.schema import DataSection
from finetune.data.cells import BROKEN, is_empty, json_cell
from finetune.data.chat import FORMS
from finetune.data.templates import ROLES, SYSTEM, Template, load_template
from finetune.errors import ConfigError, DataError, Fault

Record = dict[str, Any]


def shaped(rows: list[Record], data: DataSection) -> list[Record]:
    """The rows with `data.roles` and `data.system` applied; the same list where the recipe has neither.

    Raises ConfigError when the template has no place for them.
    """
    if not data.roles and data.system is None:
        return rows
    template = load_template(data.template).mapped(data.columns)
    faults = list(_faults(data, template))
    if faults:
        raise ConfigError(faults)
    return [row if BROKEN in row else _shaped(row, data, template) for row in rows]


def _faults(data: DataSection, template: Template) -> Iterable[Fault]:
    for name, role in data.roles.items():
        if role not in ROLES:
            yield Fault(f"data.roles.{name}", f"{role!r} is no role", f"one of {', '.join(ROLES)}")
    if data.roles and template.kind != "messages":
        what = f"rows of data.template={template.name} have no roles"
        yield Fault("data.roles", what, "leave it out, or use a template of messages")
    if data.system is not None and not template.takes_system:
        what = f"data.template={template.name} has no place for a system text"
        yield Fault("data.system", what, "leave it out, or declare `system: {}` under the template's columns")


def _shaped(row: Record, data: DataSection, template: Template) -> Record:
    names = template.file_columns(row)
    column = names.get("messages")
    messages: Any = row[column] if column is not None else None
    if template.kind == "messages":
        try:
            messages = json_cell(messages, column or "messages", "")
        except DataError:
            return row  # rendering names the row and the fault
        if not isinstance(messages, (list, tuple)) or not all(isinstance(item, Mapping) for item in messages):
            return row
        if data.roles:
            messages = [_renamed(item, data.roles) for item in messages]
            row = {**row, column: messages} if column is not None else row
    if data.system is None or _has_system(messages, template):
        return row
    own = names.get(SYSTEM, template.mapping.get(SYSTEM, SYSTEM))
    return {**row, own: data.system} if is_empty(row.get(own)) else row


def _role_key(message: Mapping[str, Any]) -> str | None:
    return next((key for key, _ in FORMS if message.get(key) is not None), None)


def _renamed(message: Mapping[str, Any], roles: Mapping[str, str]) -> Mapping[str, Any]:
    key = _role_key(message)
    written = message[key] if key else None
    return {**message, key: roles[written]} if key and isinstance(written, str) and written in roles else message


def _has_system(messages: Any, template: Template) -> bool:
    """Whether the row's first message is its own system text, an empty one too."""
    if template.kind != "messages" or not messages:
        return False
    key = _role_key(messages[0])
    written = messages[0][key] if key else None
    return isinstance(written, str) and template.roles.get(written) == "system"
