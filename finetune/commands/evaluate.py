"""`finetune evaluate`: a finished run on held-out rows."""

from __future__ import annotations

import sys

from finetune import environment
from finetune.commands.arguments import Takes, loaded, read, run_of
from finetune.commands.screen import show, show_json, table

HELP = """
Measures a finished run on its held-out rows, or on others.

Examples:
  finetune evaluate run=runs/x
  finetune evaluate run=runs/x data.valid_path=other.jsonl evaluate.max_rows=100 --json
  finetune evaluate run=runs/x evaluate.scores=exact_match,rouge_l generate.max_tokens=96
"""
ACTS = (
    "device",
    "model",
    "data",
    "evaluate.sets",
    "evaluate.max_rows",
    "evaluate.scores",
    "evaluate.answers",
    "generate",
    "plan",
    "train.seed",
)
TAKES = Takes(own={"run": "a run's folder, or its name in runs/"}, overrides=True, acts=ACTS)


def main(arguments: list[str]) -> int:
    given = read(arguments, TAKES)
    run = run_of(given, [], "run=runs/x")
    loaded(run / "recipe.yaml", given, environment.launch(), [])
    from finetune.data.preflight import DataReport, headline
    from finetune.train.after import evaluate

    counts: dict[str, dict[str, int]] = {}

    def seen(report: DataReport) -> None:
        counts[report.split] = {
            "rows": report.rows_kept, "tokens": report.tokens, "trained_tokens": report.trained_tokens,
        }  # fmt: skip
        for line in (headline(report), *(f"warning  {warning}" for warning in report.warnings)):
            print(line, file=sys.stderr)

    figures = evaluate(run, list(given.overrides), seen)
    if given.json:
        show_json({**figures, "data": counts})
        return 0
    sizes = [
        ((kind if name == "valid" else f"{name}/{kind}").replace("_", " "), count)
        for name, kinds in counts.items()
        for kind, count in kinds.items()
    ]
    show(table(("metric", "value"), [*figures.items(), *sizes]))
    return 0
