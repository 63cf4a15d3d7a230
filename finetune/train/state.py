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
from finetune.contracts import Plan
from finetune.errors import CheckpointError, StoppedError
from finetune.train.job import Job, Progress

MUST_AGREE = (
    "task", "model.path", "model.revision", "model.base", "model.trained", "model.layers", "model.new_tokens", "adapter.",
    "optimizer.name", "optimizer.full_state", "train.seed",
)  # fmt: skip
"""Keys that may not differ between a checkpoint and the run that goes on from it. (With another seed the rest of the epoch
would be another permutation's: rows would come twice, others never. The precision is compared as it was resolved.)"""
SHOWN_MECHANICS = (
    "micro_batch",
    "activation_checkpointing",
    "loss_chunk",
    "mlp_tile",
    "fast_block",
    "attention",
    "embedding_placement",
    "head_placement",
    "ranks",
    "device",
)


def save(job: Job) -> Path:
    """Writes a checkpoint of the present step and then deletes what `checkpoint.keep` no longer wants.

    Rank 0 writes; its path, or its error, is every rank's. A trial (run.keep=false) writes none.
    """
    if not job.recipe.run.keep:
        return job.checkpoints
    with job.peaks.during("save"):
        job.progress.saved = job.world.agree(lambda: write(job))
    return job.progress.saved


def stopped(job: Job, why: str, path: Path | None) -> StoppedError:
    """The error that a run ends with when it was asked to stop; `path` is where its state is saved (None: it is not)."""
    what = f"stopped by {why} after step {job.progress.step}; "
    if not job.recipe.run.keep:
        return StoppedError(f"{what}nothing is kept", "run.keep=false", "run.keep=true")
    if path is None:
        return StoppedError(f"{what}no step was trained", str(job.folder), "start it again")
    return StoppedError(f"{what}the state is saved", str(path), f"go on with run.dir={job.folder} resume=auto")


def write(job: Job) -> Path:
    """As `save`, by this process alone."""
    tensors, facts = _capture(job)
    path = store.write(job.checkpoints, job.progress.step, tensors, facts)
    store.drop_later(job.checkpoints, job.progress.step)
    protect = set()
    if job.recipe.checkpoint.keep_best and job.progress.best_step is not None:
        protect.add(store.path_of(job.checkpoints, job.progress.best_step))
    store.rotate(job.checkpoints, job.recipe.checkpoint.keep, protect)
    return path


def _capture(job: Job) -> tuple[dict[str, dict[str, torch.Tensor]], dict[str, Any]]:
    parameters = job.model.trainable()
    job.update.wait()
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
        "precision": job.precision,
        "loss_scale": job.scale.facts() if job.scale else None,
        "plan": {name: getattr(job.plan, name) for name in SHOWN_MECHANICS},
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
        if key.split(".")[0] not in ("run", "resume", "recipe", "device") and key != "model.precision"
    ]
    if facts["data"] != fingerprint:
        text = f"the training data changed since the checkpoint (fingerprint {facts['data'][:12]} then, {fingerprint[:12]} now)"
        if not facts["progress"]["complete"]:
            raise CheckpointError(text, str(path), "restore the data, or start a new run on the new data")
        notices.append(text)
    return tensors, facts, notices


def check_plan(facts: dict[str, Any], plan: Plan, precision: str) -> list[str]:
    """Holds what was resolved for this machine to what the checkpoint was made with; returns notices.

    Another plan gives the same losses, but not the same bits. Another precision is other mathematics: CheckpointError.
    """
    if facts["precision"] != precision:
        raise CheckpointError(
            f"the checkpoint was computed in {facts['precision']}, this run computes in {precision}",
            "model.precision",
            f"model.precision={facts['precision']}, or start a new run (adapter.path= goes on from a trained adapter)",
        )
    then, now = facts["plan"], {name: getattr(plan, name) for name in SHOWN_MECHANICS}
    # An older checkpoint does not say all of them.
    changed = [
        f"{name} {then[name]} then, {now[name]} now"
        for name in SHOWN_MECHANICS
        if then.get(name, now[name]) != now[name]
    ]
    return [f"the plan differs from the checkpoint's, so bits may: {'; '.join(changed)}"] if changed else []


def restore(job: Job, tensors: dict[str, dict[str, torch.Tensor]], facts: dict[str, Any]) -> list[str]:
    """Puts a checkpoint's state into the job; returns notices. Randomness comes last, so nothing between here and the
    next step draws."""
    parameters = job.model.trainable()
    resume.restore_parameters(parameters, tensors["trainable"])
    resume.restore_optimizer(
        job.optimizer, parameters, tensors["optimizer"], facts["optimizer"], on_host=job.update.keeps
    )
    job.update.settle()
    if job.scale is not None:
        for name, value in (facts.get("loss_scale") or {}).items():
            setattr(job.scale, name, value)
    for name, value in facts["progress"].items():
        setattr(job.progress, name, value)
    job.progress.complete = False
    return resume.restore_random(tensors["random"], facts["random"])


def progress_of(facts: dict[str, Any]) -> Progress:
    """The progress a checkpoint holds."""
    return Progress(**facts["progress"])
