"""`finetune recipes`: the recipes that `recipe=NAME` finds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from finetune.commands.arguments import Takes, read
from finetune.commands.screen import show, show_json, table
from finetune.config.load import find_recipe, load_recipe, recipe_names
from finetune.environment import Launch
from finetune.errors import ConfigError

HELP = """
Lists the recipes of ./recipes and those that are shipped. A recipe of ./recipes hides a shipped one of the same name.

Examples:
  finetune recipes
  finetune recipes --json
"""
TAKES = Takes()


def first_comment(path: Path) -> str:
    """What a YAML file says of itself in its first line."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return lines[0].lstrip("# ").strip() if lines and lines[0].startswith("#") else ""


def _row(name: str) -> dict[str, Any]:
    path = find_recipe(name)
    try:
        recipe = load_recipe(path, launch=Launch())
    except ConfigError as error:
        return {"name": name, "about": f"does not load: {error.faults[0].what}", "path": str(path)}
    kind = recipe.adapter.kind
    method = {"none": "full"}.get(kind, "qlora" if recipe.model.base == "nf4" else kind)
    return {
        "name": name,
        "about": first_comment(path),
        "method": method,
        "model": recipe.model.path,
        "data": recipe.data.path,
        "path": str(path),
    }


def main(arguments: list[str]) -> int:
    given = read(arguments, TAKES)
    if given.faults:
        raise ConfigError(list(given.faults))
    rows = [_row(name) for name in recipe_names()]
    if given.json:
        show_json(rows)
        return 0
    columns = ("name", "method", "model", "about")
    show(table(columns, [[row.get(column) for column in columns] for row in rows]))
    return 0
