"""One run, top to bottom: each name is made once from names above it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from finetune.checkpoint import export, store
from finetune.config.load import save_recipe
from finetune.config.schema import Recipe
from finetune.contracts import Model, Result
from finetune.data.dataset import prepare
from finetune.data.loader import Order, total_steps
from finetune.environment import Launch
from finetune.errors import InputError
from finetune.generate.evaluate import Evaluator
from finetune.kernels.precision import DTYPES
from finetune.machine.collectives import World, join, leave
from finetune.models.load import load_model, load_tokenizer
from finetune.models.shapes import shape_for
from finetune.models.verify import check_lengths
from finetune.optim.groups import roles_of
from finetune.optim.table import build
from finetune.planner import report
from finetune.planner.hardware import detect
from finetune.planner.plan import Decision, decide
from finetune.tasks.text import TextTask
from finetune.telemetry import memory, metrics
from finetune.telemetry.log import Log
from finetune.train import finish, state
from finetune.train.assemble import assemble
from finetune.train.folder import run_folder
from finetune.train.job import Job, Progress, StopSignal
from finetune.train.loop import Loop


def start(recipe: Recipe, launch: Launch) -> Result:
    """Runs `recipe` and leaves its run folder. Raises the error tree's errors; a signal saves first."""
    world = join(choose_device(recipe), launch)
    try:
        return _run(recipe, launch, world)
    finally:
        leave(world)


def _run(recipe: Recipe, launch: Launch, world: World) -> Result:
    log = Log(speaks=world.first)
    metrics.check_trackers(recipe.run.trackers)
    threads(world, launch, log)
    folder, checkpoint = run_folder(recipe, world, log)
    tokenizer = load_tokenizer(recipe.model)
    splits = prepare(recipe, tokenizer)
    finish.show_data(splits, log)
    order = Order(splits.train.lengths, recipe.train.batch, recipe.train.batch_tokens, recipe.train.seed)
    saved = state.read(checkpoint, recipe, splits.train.fingerprint) if checkpoint else None
    progress = state.progress_of(saved[1]) if saved else Progress()
    steps = total_steps(order, recipe.train.epochs, recipe.train.max_steps, progress.position, progress.step)
    for notice in saved[2] if saved else []:
        log.notice(notice)
    if saved and progress.complete and progress.step >= steps and (folder / "summary.json").exists():
        return _already_complete(folder, progress, log)
    shape = shape_for(recipe)
    hardware = detect(world.device.type)
    longest = max(int(rows.lengths.max()) for rows in (splits.train, *splits.evaluate.values()))
    decision = world.agree(lambda: decide(recipe, shape, hardware, ranks=world.size, longest_row=longest))
    log.say(report.render(decision, shape, recipe, hardware))
    model = load_model(recipe, world.device, decision.precision, shape=shape)
    document = max(int(rows.documents.lengths.max()) for rows in (splits.train, *splits.evaluate.values()))
    for notice in (*model.notices, *check_lengths(model, longest, document)):
        log.notice(notice)
    key = assemble(model, decision.plan, recipe.train.seed)
    optimizer = build(recipe.optimizer, model.trainable(), roles_of(model.module))
    job = Job(
        recipe, decision.plan, world, decision.precision, folder, splits, order, TextTask(tokenizer.pad_token_id), model,
        optimizer, key, StopSignal(log), log, progress,
    )  # fmt: skip
    if world.first:
        rehearse(job, decision)
    world.wait()
    if saved:
        state.restore(job, saved[0], saved[1])
        log.say(
            f"resumed from {checkpoint} at step {job.progress.step}, epoch {job.progress.epoch}, row {job.progress.row}"
        )
    return _train(job, decision, steps)


def _train(job: Job, decision: Decision, steps: int) -> Result:
    recipe, world, log = job.recipe, job.world, job.log
    evaluator = Evaluator(job.task, job.model, job.plan, world, job.precision, _interrupt(job))
    writer = None
    if world.first:
        settings = recipe.model_dump(mode="json")
        writer = metrics.Metrics(job.folder, recipe.run.trackers, recipe.recipe, settings, job.progress.step)
    memory.reset_peak(world.device)
    if world.first and not job.progress.samples_before:
        job.progress.samples_before = finish.samples(job)
    world.wait()
    try:
        with job.stop:
            Loop(job, evaluator, writer, steps).run()
    finally:
        if writer is not None:
            writer.close()
    after = finish.samples(job) if world.first else []
    finish.show_samples(job, after)
    result = export_result(job.model, recipe, job.folder, job.precision) if world.first else None
    summary = finish.summarize(job, decision, after, result)
    if world.first:
        finish.write_json(job.folder / "summary.json", summary)
        log.say(f"done: {result}  ({job.progress.step} steps, {summary['tokens_per_s']:,.0f} tokens/s)")
    world.wait()
    return Result(job.folder, result, summary)


def choose_device(recipe: Recipe) -> str:
    """cuda where there is one, unless the recipe says cpu."""
    available = torch.cuda.is_available()
    if recipe.device == "cuda" and not available:
        raise InputError("no CUDA device is available", "device=cuda", "device=cpu, or check the driver")
    return "cuda" if available and recipe.device != "cpu" else "cpu"


def threads(world: World, launch: Launch, log: Log) -> None:
    """Uses every core on a CPU run of one process: accelerate's launcher sets one thread where nobody asked for that."""
    cores = detect("cpu").cores
    if launch.one_of_several and world.size == 1:
        log.warn(
            "several processes were asked for, but accelerate started one: on CPUs it leaves that to MPI. "
            "For several CPU processes: torchrun --nproc-per-node 2 -m finetune ..."
        )
    if world.device.type == "cpu" and world.size == 1 and launch.accelerate and torch.get_num_threads() < cores:
        log.notice(f"using {cores} CPU threads (the launcher had set {torch.get_num_threads()})")
        torch.set_num_threads(cores)


def rehearse(job: Job, decision: Decision) -> None:
    """Tries what could fail at the end before step 1: the folder, room for a checkpoint, the model's export."""
    trained = sum(p.numel() * p.element_size() for p in job.model.trainable().values())
    state_bytes = decision.estimate.phases["step"].causes.get("optimizer", 0)
    store.rehearse(job.checkpoints, 2 * trained + state_bytes)
    for notice in export.check_export(job.model):
        job.log.notice(notice)
    save_recipe(job.recipe, job.folder / "recipe.yaml")
    (job.folder / "plan.yaml").write_text(_yaml(asdict(job.plan)), encoding="utf-8")


def _yaml(values: dict[str, Any]) -> str:
    import yaml

    plain = {key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}
    return yaml.safe_dump(plain, sort_keys=False)


def _interrupt(job: Job) -> Callable[[], None]:
    """What evaluation asks between batches: with several ranks a signal waits for the next step, which they agree on."""
    return job.stop.check if job.world.size == 1 else (lambda: None)


def export_result(model: Model, recipe: Recipe, folder: Path, precision: str) -> Path:
    """Writes the run's result: `adapter/`, or `model/` of a full fine-tune."""
    if recipe.adapter.kind != "none":
        return export.export_adapter(model, folder / "adapter")
    return export.export_merged(model, folder / "model", DTYPES[precision])


def _already_complete(folder: Path, progress: Progress, log: Log) -> Result:
    log.say(f"already complete at step {progress.step}: {folder}. Raise train.epochs or train.max_steps to go on.")
    facts = finish.read_json(folder / "summary.json")
    return Result(folder, Path(facts["result"]) if facts.get("result") else None, facts)
