"""The whole state of a run, to a checkpoint and back: trained weights, optimizer, randomness, progress.

The schedule, the data order and the draws inside the model are functions of the step, the epoch and the seed, so they
need no state of their own. Frozen weights are never written: the model's path is, and it must be the same on resume.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from finetune.checkpoint import resume, store
from finetune.config.load import recipe_differences
from finetune.config.schema import Recipe
from finetune.errors import CheckpointError
from finetune.train.job import Job, Progress

MUST_AGREE = ("task", "model.path", "model.revision", "model.base", "model.precision", "adapter.", "optimizer.name")
"""Keys that may not differ between a checkpoint and the run that goes on from it."""


def save(job: Job) -> Path | None:
    """Writes a checkpoint of the present step and then deletes what `checkpoint.keep` no longer wants. Rank 0 writes."""
    path = None
    if job.world.first:
        tensors, facts = _capture(job)
        path = store.write(job.checkpoints, job.progress.step, tensors, facts)
        protect = set()
        if job.recipe.checkpoint.keep_best and job.progress.best_step is not None:
            protect.add(store.path_of(job.checkpoints, job.progress.best_step))
        store.rotate(job.checkpoints, job.recipe.checkpoint.keep, protect)
    job.world.wait()
    return path


def _capture(job: Job) -> tuple[dict[str, dict[str, torch.Tensor]], dict[str, Any]]:
    parameters = job.model.trainable()
    optimizer, optimizer_facts = resume.optimizer_tensors(job.optimizer, parameters)
    random, random_facts = resume.random_state()
    tensors = {
        "trainable": {name: p.detach() for name, p in parameters.items()},
        "optimizer": optimizer,
        "random": random,
    }
    facts = {
        "progress": job.progress.facts(),
        "optimizer": optimizer_facts,
        "random": random_facts,
        "recipe": job.recipe.model_dump(mode="json"),
        "data": job.splits.train.fingerprint,
        "ranks": job.world.size,
    }
    return tensors, facts


def read(
    path: Path, recipe: Recipe, fingerprint: str
) -> tuple[dict[str, dict[str, torch.Tensor]], dict[str, Any], list[str]]:
    """A checkpoint's tensors and facts, after it was seen to belong to this recipe and data; and what to tell the user.

    A finished run is read whatever its data are now (the caller reports it); an unfinished one on other data is refused.
    """
    tensors, facts = store.read(path)
    differences = recipe_differences(Recipe.model_validate(facts["recipe"]), recipe)
    clashes = [d for d in differences if d[0].startswith(MUST_AGREE)]
    if clashes:
        listed = "; ".join(f"{key}: {old!r} in the checkpoint, {new!r} now" for key, old, new in clashes)
        raise CheckpointError(
            f"the recipe differs from the checkpoint's: {listed}",
            str(path),
            "use the checkpoint's values, or start a new run (adapter.path= goes on from a trained adapter)",
        )
    notices = [
        f"{key} was {old!r} when the checkpoint was written and is {new!r} now"
        for key, old, new in differences
        if key.split(".")[0] not in ("run", "resume", "recipe", "device")
    ]
    if facts["data"] != fingerprint:
        text = f"the training data changed since the checkpoint (fingerprint {facts['data'][:12]} then, {fingerprint[:12]} now)"
        if not facts["progress"]["complete"]:
            raise CheckpointError(text, str(path), "restore the data, or start a new run on the new data")
        notices.append(text)
    return tensors, facts, notices


def restore(job: Job, tensors: dict[str, dict[str, torch.Tensor]], facts: dict[str, Any]) -> None:
    """Puts a checkpoint's state into the job. Randomness comes last, so nothing between here and the next step draws."""
    parameters = job.model.trainable()
    resume.restore_parameters(parameters, tensors["trainable"])
    resume.restore_optimizer(job.optimizer, parameters, tensors["optimizer"], facts["optimizer"])
    for name, value in facts["progress"].items():
        setattr(job.progress, name, value)
    job.progress.complete = False
    resume.restore_random(tensors["random"], facts["random"])


def progress_of(facts: dict[str, Any]) -> Progress:
    """The progress a checkpoint holds."""
    return Progress(**facts["progress"])
