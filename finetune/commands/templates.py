"""`finetune templates`: the data templates that `data.template=NAME` finds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from finetune import environment
from finetune.commands.arguments import Takes, read
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


def _row(name: str) -> dict[str, Any]:
    """A template's name, what it says of itself, and its file; the user's own folder comes first."""
    for folder in (Path("data_templates"), environment.shipped_folder("data_templates")):
        path = folder / f"{name}.yaml"
        if path.is_file():
            try:
                content = yaml.safe_load(path.read_text(encoding="utf-8"))
            except (yaml.YAMLError, UnicodeDecodeError):
                content = None
            about = content.get("description") if isinstance(content, dict) else "not a template"
            return {"name": name, "about": about, "path": str(path)}
    return {"name": name, "about": None, "path": None}


def main(arguments: list[str]) -> int:
    given = read(arguments, TAKES)
    if given.faults:
        raise ConfigError(list(given.faults))
    from finetune.data.templates import template_names

    rows = [_row(name) for name in template_names()]
    if given.json:
        show_json(rows)
    else:
        show(table(("name", "about"), [(row["name"], row["about"]) for row in rows]))
    return 0
