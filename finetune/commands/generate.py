"""`finetune generate`: an answer of a finished run."""

from __future__ import annotations

from finetune import environment
from finetune.commands.arguments import Takes, loaded, read, run_of
from finetune.commands.screen import show_json

HELP = """
Answers a prompt with a finished run's model. The prompt goes through the run's data template.

Examples:
  finetune generate run=runs/x prompt="She go to school every day."
  finetune generate run=runs/x prompt="Hello" generate.max_tokens=200 generate.temperature=0.7
"""
ACTS = ("device", "model", "data.template", "data.columns", "generate", "train.seed")
TAKES = Takes(
    own={"run": "a run's folder, or its name in runs/", "prompt": "what to answer"}, overrides=True, acts=ACTS
)


def main(arguments: list[str]) -> int:
    given = read(arguments, TAKES)
    run = run_of(given, given.need("prompt", 'prompt="Hello"'), "run=runs/x")
    loaded(run / "recipe.yaml", given, environment.launch(), [])
    from finetune.train.after import generate

    answers = generate(run, [given.own["prompt"]], list(given.overrides))
    if given.json:
        show_json({"prompt": given.own["prompt"], "answer": answers[0]})
    else:
        print(answers[0])
    return 0
