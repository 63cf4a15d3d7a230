"""`finetune data`: what a recipe's data become, counted, before any model is loaded."""

from __future__ import annotations

import sys

from finetune import environment
from finetune.commands.arguments import Takes, read, recipe_of
from finetune.commands.screen import show, show_json
from finetune.errors import Fault

HELP = """
Reads a recipe's data, renders them through the template, and reports rows, tokens, trained tokens, lengths, packing,
and everything that was cut, dropped or skipped, with its reason and its lines. Ends with 2 where the data cannot be
trained on. No model is loaded.

Examples:
  finetune data recipe=quickstart
  finetune data recipe=lora_llama3 data.path=my.jsonl data.template=alpaca data.columns.instruction=question
  finetune data recipe=quickstart rows=5 --json
"""
TAKES = Takes(
    own={"rows": "show the first N documents of each split, trained text marked (1)"}, recipe=True, overrides=True
)
DEFAULT_ROWS = 1


def main(arguments: list[str]) -> int:
    given = read(_words(arguments), TAKES)
    shown, faults = _count(given.own.get("rows"))
    recipe = recipe_of(given, environment.launch(), faults)
    from finetune.data import preflight
    from finetune.data.opening import open_data
    from finetune.data.own_chat import prepare_tokenizer
    from finetune.models.load import load_tokenizer

    def say(line: str) -> None:
        print(line, file=sys.stderr)

    tokenizer = prepare_tokenizer(load_tokenizer(recipe.model), recipe.data, say)
    splits = open_data(recipe, tokenizer, tell=say, strict=False)
    sets = {"train": splits.train, **splits.evaluate}
    pieces = {name: [preflight.pieces(row, tokenizer) for row in rows.documents[:shown]] for name, rows in sets.items()}
    if given.json:
        show_json(
            {
                name: preflight.as_dict(rows.report) | {"documents_shown": preflight.plain(pieces[name])}
                for name, rows in sets.items()
            }
        )
    for name, rows in sets.items():
        if not given.json:
            show(preflight.render(rows.report, pieces[name]))
    for rows in sets.values():
        preflight.check(rows.report)
    return 0


def _words(arguments: list[str]) -> list[str]:
    """`--rows 3` is `rows=3`."""
    words = list(arguments)
    if "--rows" in words:
        at = words.index("--rows")
        words[at : at + 2] = [f"rows={words[at + 1] if at + 1 < len(words) else ''}"]
    return words


def _count(text: str | None) -> tuple[int, list[Fault]]:
    if text is None:
        return DEFAULT_ROWS, []
    if text.isdecimal():
        return int(text), []
    return DEFAULT_ROWS, [Fault("command line rows", f"{text!r} is not a whole number", "for example: rows=3")]
