"""`finetune templates`: the data templates that `data.template=NAME` finds."""

from __future__ import annotations

from typing import Any

from finetune.commands.arguments import Takes, read
from finetune.commands.screen import show, show_json, table
from finetune.errors import ConfigError, DataError

HELP = """
Lists the data templates: how a row of a file becomes a prompt and an answer. A path to a YAML of your own works as well:
data.template=my.yaml.

Examples:
  finetune templates
  finetune templates --json
"""
TAKES = Takes()


def _row(name: str) -> dict[str, Any]:
    """A template's name, its columns, what it says of itself, and its file; the user's own folder comes first."""
    from finetune.data.templates import find_template, load_template

    columns = ""
    try:
        template = load_template(name)
        about = template.description
        columns = ", ".join(column.name if column.required else f"({column.name})" for column in template.columns)
    except DataError as error:
        about = f"does not load: {error.fault.what}"
    return {"name": name, "columns": columns, "about": about, "path": str(find_template(name))}


def main(arguments: list[str]) -> int:
    given = read(arguments, TAKES)
    if given.faults:
        raise ConfigError(list(given.faults))
    from finetune.data.templates import template_names

    rows = [_row(name) for name in template_names()]
    if given.json:
        show_json(rows)
    else:
        show(table(("name", "columns", "about"), [(row["name"], row["columns"], row["about"]) for row in rows]))
    return 0
