"""`finetune data`: what a recipe's data become, counted, before any model is loaded."""

from __future__ import annotations

import sys

from finetune import environment
from finetune.commands.arguments import Takes, read, recipe_of
from finetune.commands.screen import show, show_json

HELP = """
Reads a recipe's data, renders them through the template, and reports rows, tokens, trained tokens, lengths, packing,
and everything that was cut, dropped or skipped, with its reason.

Examples:
  finetune data recipe=quickstart
  finetune data recipe=lora_llama3 data.path=my.jsonl data.template=alpaca data.columns.instruction=question
  finetune data recipe=quickstart --json
"""
TAKES = Takes(recipe=True, overrides=True)


def main(arguments: list[str]) -> int:
    given = read(arguments, TAKES)
    recipe = recipe_of(given, environment.launch())
    from finetune.data import preflight
    from finetune.data.opening import open_data
    from finetune.models.load import load_tokenizer

    splits = open_data(
        recipe, load_tokenizer(recipe.model), tell=lambda line: print(line, file=sys.stderr), strict=False
    )
    reports = {"train": splits.train.report, **{name: rows.report for name, rows in splits.evaluate.items()}}
    if given.json:
        show_json({name: preflight.as_dict(report) for name, report in reports.items()})
    for name, report in reports.items():
        if not given.json:
            show(name, preflight.render(report))
    for report in reports.values():
        preflight.check(report)
    return 0
