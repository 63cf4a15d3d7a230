"""`finetune plan`: how a recipe would run, and the bytes and seconds that it would take. Nothing runs."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from finetune import environment
from finetune.commands.arguments import Takes, notes_of_launch, read, recipe_of, tell
from finetune.commands.screen import show, show_json
from finetune.config.check import resolve_launch
from finetune.errors import Fault, InputError

if TYPE_CHECKING:
    from finetune.config.schema import Recipe
    from finetune.planner.hardware import Hardware

HELP = """
Shows how a recipe would run on this machine, or on a pretend one, and what it would take. Nothing runs, no weights are
read. Ends with exit code 3 when nothing fits.

Examples:
  finetune plan recipe=lora_llama3
  finetune plan recipe=qlora_llama3 hardware=rtx4090-24
  finetune plan recipe=full_llama3 plan.gpu_memory=24GiB picture=plan.png --json
"""
TAKES = Takes(
    own={
        "hardware": "a pretend machine: GPUs x memory, host memory (8x80GB,1TB), or rtx4090-24, a100-80, h100-80, h200-141, cpu",
        "picture": "a PNG to write: memory and speed of the plans that no other beats",
    },
    recipe=True,
    overrides=True,
)


def main(arguments: list[str]) -> int:
    given = read(arguments, TAKES)
    launch = environment.launch()
    picture = given.own.get("picture")
    if picture is not None:
        from finetune.planner.picture import check_picture, draw

        check_picture(picture)
    pretend, faults = _pretend(given.own.get("hardware"))
    if pretend is not None:
        launch = replace(launch, world=max(1, pretend.gpus))
    left_open = recipe_of(given, launch, faults)
    recipe = resolve_launch(left_open, launch)
    tell(notes_of_launch(left_open, recipe, launch), launch)
    from finetune.models.adapter_folder import as_planned
    from finetune.models.shapes import shape_for
    from finetune.planner import report
    from finetune.planner.hardware import detect
    from finetune.planner.machine_rates import with_rates
    from finetune.planner.plan import decide
    from finetune.planner.refusal import PlanRefusedError

    shape = shape_for(recipe)
    if _names_layers(recipe):
        from finetune.models.layer_names import check_layer_names

        check_layer_names(recipe)
    recipe = as_planned(recipe)
    hardware = pretend or with_rates(detect(recipe.device), lambda note: tell([note], launch))
    try:
        decision = decide(recipe, shape, hardware, ranks=launch.world, longest_row=recipe.data.max_tokens)
    except PlanRefusedError as error:
        if given.json:
            show_json(report.refused_as_dict(error))
        raise
    if picture is not None:
        draw(decision, f"{shape.name}, {hardware.name}", picture)
    if given.json:
        show_json(report.as_dict(decision, shape, recipe, hardware))
    else:
        show(report.render(decision, shape, recipe, hardware))
    return 0


def _names_layers(recipe: Recipe) -> bool:
    """Whether the recipe names layers of the model, which only its config can tell right from wrong."""
    adapter, train = recipe.adapter, recipe.train
    named = (set(adapter.targets) - {"all-linear"}, adapter.modules_to_save, adapter.ranks, adapter.alphas)
    return any(named if adapter.kind != "none" else (train.modules, train.freeze, train.last_blocks))


def _pretend(text: str | None) -> tuple[Hardware | None, list[Fault]]:
    """The machine that `hardware=` describes, or what is wrong with the description."""
    if not text:
        return None, []
    from finetune.planner.hardware import parse

    try:
        return parse(text), []
    except InputError as error:
        return None, [error.fault]
