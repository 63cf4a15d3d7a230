"""`finetune train`: the main job. `finetune.run` is the same thing from Python."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from finetune import environment
from finetune.commands.arguments import Takes, known_names, notes_of_launch, read, recipe_of, tell
from finetune.config.check import resolve_launch
from finetune.config.load import load_recipe, notes_of_words
from finetune.config.schema import Recipe
from finetune.contracts import Result

HELP = """
Fine-tunes a model as a recipe says: plans, prints the plan, evaluates, trains, evaluates again, and leaves a run
folder with the recipe, the plan, the metrics, checkpoints and the adapter or model.

A recipe is a name (`finetune recipes` lists them), a YAML file, or a finished run's folder. Keys given here win over
the file. `null` unsets a key that may be unset; lists are written a,b or [a,b]; ${section.key} refers to another key.

Examples:
  finetune recipe=quickstart
  accelerate launch -m finetune recipe=lora_llama3 model.path=DIR data.path=my.jsonl data.template=alpaca
  finetune recipe=quickstart train.max_steps=100 plan.gpu_memory=8GiB run.dir=runs/try resume=auto
"""
TAKES = Takes(recipe=True, overrides=True, json=False, lists_keys=True)


def main(arguments: list[str]) -> int:
    given = read(arguments, TAKES)
    launch = environment.launch()
    _start(recipe_of(given, launch), launch)
    return 0


def run(recipe: Mapping[str, Any] | str | Path, *overrides: str) -> Result:
    """Fine-tunes, and returns the run's folder, what it made, and its summary.

    `recipe` is a name, a file, a run's folder, or a dictionary of sections (native values or text); `overrides` are
    "section.key=value". Raises FinetuneError: ConfigError with all faults of the recipe, NothingFitsError, and so on.
    """
    launch = environment.launch()
    loaded = load_recipe(recipe, overrides, known_names(), launch)
    tell(notes_of_words(recipe, overrides), launch)
    return _start(loaded, launch)


def _start(recipe: Recipe, launch: environment.Launch) -> Result:
    resolved = resolve_launch(recipe, launch)
    tell(notes_of_launch(recipe, resolved, launch), launch)
    from finetune.models.new_tokens import with_tokens

    standing = with_tokens(resolved)
    if standing is not resolved:
        count = len(standing.model.new_tokens)
        note = (
            f"model.new_tokens_path={resolved.model.new_tokens_path} was read: the run keeps {count} model.new_tokens"
        )
        tell([note], launch)
    from finetune.train.start import start

    return start(standing, launch)
