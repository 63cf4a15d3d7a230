"""`finetune runs`: the runs of a folder with what they came to, or two of them side by side."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from finetune.commands.arguments import COMMAND_LINE, Takes, find_run, read
from finetune.commands.screen import show, show_json, table
from finetune.config import keys
from finetune.config.load import load_recipe, recipe_differences
from finetune.config.schema import Recipe
from finetune.environment import Launch, user_path
from finetune.errors import ConfigError, Fault

HELP = """
Lists the runs of a folder, newest last, or shows how two runs' recipes and figures differ.

Examples:
  finetune runs
  finetune runs path=elsewhere/runs --json
  finetune runs diff=runs/a,runs/b
"""
TAKES = Takes(own={"path": "the folder of runs (default runs/)", "diff": "two runs: A,B"})
FIGURES = ("steps", "loss_first", "loss_last", "eval_before", "eval_after", "tokens_per_s", "seconds")


def main(arguments: list[str]) -> int:
    given = read(arguments, TAKES)
    if given.faults:
        raise ConfigError(list(given.faults))
    root = user_path(given.own.get("path") or "runs", f"{COMMAND_LINE} path")
    if "diff" in given.own:
        return _show_difference(given.own["diff"], root, given.json)
    folders = sorted((path.parent for path in root.glob("*/recipe.yaml")), key=lambda path: path.stat().st_mtime)
    rows = [_row(folder) for folder in folders]
    if given.json:
        show_json(rows)
    elif not rows:
        show(f"There are no runs in {root}/ yet.")
    else:
        columns = ("run", "state", "model", "method", "steps", "loss_last", "eval_loss", "tokens_per_s")
        show(table(columns, [[row.get(column) for column in columns] for row in rows]))
    return 0


def summary_of(run: Path) -> dict[str, Any] | None:
    """What a run came to; None when it wrote no summary that can be read."""
    try:
        found = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def _recipe_of(run: Path) -> Recipe:
    return load_recipe(run / "recipe.yaml", launch=Launch())


def _eval_loss(figures: Any) -> float | None:
    """The held-out loss in an evaluation's figures."""
    return figures.get("eval_loss") if isinstance(figures, dict) else None


def _row(run: Path) -> dict[str, Any]:
    summary = summary_of(run)
    row: dict[str, Any] = {"run": run.name, "path": str(run), "state": "finished" if summary else "no summary"}
    try:
        recipe = _recipe_of(run)
        row |= {"recipe": recipe.recipe, "model": recipe.model.path, "method": recipe.adapter.kind}
    except ConfigError as error:
        row |= {"state": f"recipe does not load: {error.faults[0].what}"}
    figures = summary or {}
    row |= {name: figures.get(name) for name in FIGURES}
    return row | {"eval_loss": _eval_loss(figures.get("eval_after"))}


def _show_difference(pair: str, root: Path, as_json: bool) -> int:
    names = [name.strip() for name in pair.split(",") if name.strip()]
    if len(names) != 2:
        raise ConfigError([Fault("command line diff", f"{pair!r} does not name two runs", "write diff=runs/a,runs/b")])
    found = [find_run(name, root) for name in names]
    faults = [run for run in found if isinstance(run, Fault)]
    if faults:
        raise ConfigError(faults)
    first, second = (run for run in found if isinstance(run, Path))
    differences = recipe_differences(_recipe_of(first), _recipe_of(second))
    figures = {name: [(summary_of(run) or {}).get(name) for run in (first, second)] for name in FIGURES}
    if as_json:
        recipes = {key: [a, b] for key, a, b in differences}
        show_json({"runs": [str(first), str(second)], "recipe": recipes, "figures": figures})
        return 0
    rows = [(key, keys.show(a), keys.show(b)) for key, a, b in differences]
    columns = ("", str(first), str(second))
    show(table(columns, rows, "Recipe") if rows else "The two recipes are equal.", "")
    show(table(columns, [(name, *map(_cell, pair)) for name, pair in figures.items()], "Figures"))
    return 0


def _cell(value: Any) -> Any:
    """A figure; an evaluation's figures in one line."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {inner:.4f}" for name, inner in value.items() if isinstance(inner, float))
    return value
