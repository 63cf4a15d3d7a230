"""`finetune templates`: the data templates that `data.template=NAME` finds."""

from __future__ import annotations

from typing import Any

from finetune import environment
from finetune.commands.arguments import Takes, read
from finetune.commands.recipes import first_comment
from finetune.commands.screen import show, show_json, table
from finetune.errors import ConfigError

HELP = """
Lists the data templates: how a row of a file becomes a prompt and an answer. A path to a YAML of your own works as well:
data.template=my.yaml.

Examples:
  finetune templates
  finetune templates --json
"""
TAKES = Takes()


def main(arguments: list[str]) -> int:
    given = read(arguments, TAKES)
    if given.faults:
        raise ConfigError(list(given.faults))
    from finetune.data.templates import template_names

    folder = environment.shipped_folder("data_templates")
    rows: list[dict[str, Any]] = []
    for name in template_names():
        path = folder / f"{name}.yaml"
        about = first_comment(path) if path.is_file() else None
        rows.append({"name": name, "about": about, "path": str(path) if path.is_file() else None})
    if given.json:
        show_json(rows)
    else:
        show(table(("name", "about"), [(row["name"], row["about"]) for row in rows]))
    return 0
