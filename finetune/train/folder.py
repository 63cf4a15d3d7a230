"""Where a run lives: its folder, and the checkpoint to go on from. The same answer on every rank."""

from __future__ import annotations

import re
from datetime import datetime
from pathlib import Path

from finetune.checkpoint import store
from finetune.config.schema import Recipe
from finetune.environment import user_path
from finetune.errors import CheckpointError
from finetune.machine.collectives import World
from finetune.telemetry.log import Log

TIMES = r"-[0-9]{8}-[0-9]{6}"
"""What follows a recipe's name in the name of a run's folder; so `lora` never goes on with a run of `lora-2`."""


def run_folder(recipe: Recipe, world: World, log: Log) -> tuple[Path, Path | None]:
    """The run's folder and the checkpoint to go on from, if any; the same on every rank."""
    return world.agree(lambda: _find_folder(recipe, log))


def _find_folder(recipe: Recipe, log: Log) -> tuple[Path, Path | None]:
    fresh = user_path(recipe.run.dir or f"runs/{recipe.recipe}-{datetime.now():%Y%m%d-%H%M%S}", "run.dir")
    if recipe.resume is None:
        if store.complete(fresh / "checkpoints"):
            raise CheckpointError(
                "this folder already holds a run", str(fresh), "resume=auto goes on with it; or another run.dir"
            )
        return fresh, None
    if recipe.resume != "auto":
        path = user_path(recipe.resume, "resume")
        return _folder_for(path, fresh if recipe.run.dir else None, log), path
    if recipe.run.dir:
        folders = [fresh]
    else:
        own = re.compile(re.escape(recipe.recipe) + TIMES)
        folders = sorted((path for path in Path("runs").glob("*") if own.fullmatch(path.name)), reverse=True)
    for folder in folders:
        checkpoint, notices = store.newest(folder / "checkpoints")
        for notice in notices:
            log.warn(notice)
        if checkpoint is not None:
            return folder, checkpoint
    log.notice(f"resume=auto: no checkpoint in {recipe.run.dir or f'runs/{recipe.recipe}-*'}; starting anew")
    return fresh, None


def _folder_for(checkpoint: Path, wanted: Path | None, log: Log) -> Path:
    """The run folder of a run that goes on from a checkpoint named by the user: that checkpoint's own, or `wanted`."""
    remedy = "resume=auto, or a folder like runs/x/checkpoints/step-0000050"
    if not checkpoint.is_dir():
        raise CheckpointError("no such checkpoint", str(checkpoint), remedy)
    own = checkpoint.resolve().parent.parent
    if wanted is None and (checkpoint.resolve().parent.name != "checkpoints" or store.step_of(checkpoint) is None):
        what = "this checkpoint is not in a run's folder, so where the run lives is not known"
        raise CheckpointError(what, str(checkpoint), "give run.dir=FOLDER too")
    folder = wanted or own
    there = store.complete(folder / "checkpoints")
    if folder.resolve() != own:
        if there:
            raise CheckpointError("this folder already holds another run", str(folder), "give another run.dir")
        return folder
    later = [path.name for path in there if (store.step_of(path) or 0) > (store.step_of(checkpoint) or 0)]
    if later:
        log.warn(
            f"going back to {checkpoint.name}: the first save deletes what was trained after it ({', '.join(later)}); "
            "another run.dir keeps it"
        )
    return folder


def result_place(recipe: Recipe, folder: Path) -> Path:
    """Where a run's result lies: `adapter/`, or `model/` of a full fine-tune."""
    return folder / ("model" if recipe.adapter.kind == "none" else "adapter")
