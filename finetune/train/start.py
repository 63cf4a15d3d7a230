"""One run, top to bottom: each name is made once from names above it."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from finetune.checkpoint import export, store
from finetune.checkpoint.folders import write_text, writing
from finetune.checkpoint.lock import held
from finetune.config.load import save_recipe
from finetune.config.schema import Recipe
from finetune.contracts import Model, Result
from finetune.data.loader import total_steps
from finetune.data.opening import open_data, order_of
from finetune.data.own_chat import prepare_tokenizer
from finetune.environment import Launch, let_segments_grow
from finetune.errors import InputError, StoppedError
from finetune.generate.evaluate import Evaluator
from finetune.generate.scores import check_scores
from finetune.kernels.precision import DTYPES, loss_scale
from finetune.machine.collectives import World, join, leave
from finetune.models.adapter_folder import as_planned
from finetune.models.load import load_model, load_tokenizer
from finetune.models.new_tokens import tokens_of
from finetune.models.shapes import shape_for
from finetune.models.verify import check_lengths
from finetune.optim.groups import roles_of
from finetune.optim.schedule import rate_notices, schedule_notices
from finetune.optim.table import build, notices
from finetune.planner import report
from finetune.planner.hardware import CONTEXT_BYTES, detect, host_free
from finetune.planner.plan import Decision, decide, space_of
from finetune.planner.shrink import found_again
from finetune.planner.space import Space
from finetune.tasks.text import TextTask
from finetune.telemetry import memory, metrics
from finetune.telemetry.health import Health
from finetune.telemetry.log import BytesProgress, Log
from finetune.train import finish, state
from finetune.train.assemble import Update, assemble, host_blocks, host_room, streamed
from finetune.train.folder import result_place, run_folder
from finetune.train.job import Job, Progress, StopAskedError, StopSignal
from finetune.train.loop import Loop
from finetune.train.recovery import AgainError, MemoryFullError, memory_named, smaller_plan
from finetune.train.run_rates import PLAN, hardware_of, stored

SUMMARY = "summary.json"


def start(recipe: Recipe, launch: Launch) -> Result:
    """Runs `recipe` and leaves its run folder. Raises the error tree's errors; a signal saves first."""
    let_segments_grow()
    world = join(choose_device(recipe), launch)
    try:
        with memory_named("loading, planning or saving"):
            return _run(recipe, launch, world)
    finally:
        leave(world)


def _run(recipe: Recipe, launch: Launch, world: World) -> Result:
    log = Log(speaks=world.first)
    metrics.check_trackers(recipe.run.trackers)
    check_scores(recipe.evaluate.scores)
    threads(world, launch, log)
    folder, checkpoint = run_folder(recipe, world, log)
    with ExitStack() as stack:
        notice = world.agree(lambda: stack.enter_context(held(folder)))
        if notice:
            log.notice(notice)
        tried: list[dict[str, Any]] = []
        while True:
            try:
                return _run_in(folder, (checkpoint, tried), recipe, world, log)
            except AgainError as error:
                checkpoint, tried = error.checkpoint, error.out_of_memory
            # Out of the handler: its error held the frames, and they what the smaller plan needs the room of.
            gc.collect()


def _run_in(
    folder: Path, begin: tuple[Path | None, list[dict[str, Any]]], recipe: Recipe, world: World, log: Log
) -> Result:
    """One run from a checkpoint (None: from the start), and what out-of-memory it met before, where it is built again."""
    checkpoint, tried = begin
    tokenizer = prepare_tokenizer(load_tokenizer(recipe.model), recipe.data, log.notice)
    splits = open_data(recipe, tokenizer, world, log.say)
    finish.show_data(splits, log)
    order = order_of(recipe, splits.train)
    saved = state.read(checkpoint, recipe, splits.train.fingerprint) if checkpoint else None
    progress = state.progress_of(saved[1]) if saved else Progress()
    steps = total_steps(order, recipe.train.epochs, recipe.train.max_steps, progress.position, progress.step)
    for notice in saved[2] if saved else _trial_notices(recipe):
        log.notice(notice)
    if saved and world.agree(lambda: _is_complete(recipe, folder, progress, steps)):
        return _already_complete(recipe, folder, progress, log)
    shape, planned = shape_for(recipe), as_planned(recipe)
    memory.clear(world.device)
    peaks = memory.Peaks(world.device)
    peaks.enter("load")
    hardware = hardware_of(world, checkpoint, log)
    longest = max(rows.longest_row for rows in (splits.train, *splits.evaluate.values()))
    lengths = order.lengths[order.permutation(0)]
    decision = world.agree(lambda: decide(planned, shape, hardware, world.size, longest, lengths))
    space = space_of(planned, shape, hardware, world.size, longest, lengths)
    met = tried or progress.out_of_memory
    decided = decision
    decision = world.agree(lambda: _in_force(decided, space, met, log))
    log.say(report.render(decision, shape, planned, hardware))
    for notice in state.check_plan(saved[1], decision.plan, decision.precision) if saved else []:
        log.notice(notice)
    _enforce(recipe, world, decision)
    with BytesProgress(log, "weights to host memory") as arriving:
        room = host_room(recipe, host_free(), min(world.size, hardware.gpus or world.size))
        host = host_blocks(decision.plan, recipe, world.device, room, arriving)
        model = load_model(recipe, host or world.device, decision.precision, shape=shape, tokenizer=tokenizer)
    document = max(rows.longest_document for rows in (splits.train, *splits.evaluate.values()))
    for notice in (*model.notices, *check_lengths(model, longest, document)):
        log.notice(notice)
    ready = assemble(model, decision.plan, recipe.train.seed, world.device, decision.precision, host)
    named, roles = model.trainable(), roles_of(model.module)
    optimizer = build(recipe.optimizer, named, roles, recipe.model.trained, recipe.train.seed)
    for notice in (
        *notices(recipe.optimizer, named, roles),
        *rate_notices(recipe.optimizer, recipe.train),
        *schedule_notices(recipe.schedule, steps),
    ):
        log.notice(notice)
    stream = streamed(model, decision.plan, recipe, host, optimizer, decision.precision)
    job = Job(
        recipe, decision.plan, world, decision.precision, folder, splits, order, TextTask(tokenizer.pad_token_id), model,
        optimizer, Update(model, optimizer, decision.plan, world.device, stream), ready.key, ready.given,
        loss_scale(decision.precision), Health(list(model.trainable())), StopSignal(log, recipe.run.keep), log, progress,
        peaks,
    )  # fmt: skip
    world.agree(lambda: rehearse(job, decision))
    if checkpoint is not None and saved:
        _restore(job, checkpoint, saved)
    job.progress.out_of_memory = met
    return _train(job, decision, steps, space)


def _enforce(recipe: Recipe, world: World, decision: Decision) -> None:
    """A budget is what the process takes, so torch's allocator gets it less what stands beside it."""
    if world.device.type == "cuda" and isinstance(recipe.plan.gpu_memory, int):
        memory.cap(world.device, decision.budget.device_bytes - CONTEXT_BYTES)


def _restore(job: Job, checkpoint: Path, saved: tuple[Any, dict[str, Any], list[str]]) -> None:
    """The checkpoint's state, as read before the model was loaded."""
    with job.peaks.during("resume"):
        told = state.restore(job, saved[0], saved[1])
    for notice in told:
        job.log.notice(notice)
    progress = job.progress
    progress.saved = checkpoint
    place = f"step {progress.step}, epoch {progress.epoch}, {job.order.place(progress.row)}"
    job.log.say(f"resumed from {checkpoint} at {place}")


def _in_force(decision: Decision, space: Space, met: list[dict[str, Any]], log: Log) -> Decision:
    """The plan that the run went over to when memory ran out, if it did and pins and machine still allow it."""
    if not met:
        return decision
    found = found_again(space, decision, met[-1]["after"])
    if found is None:
        log.notice(
            "memory ran out earlier in this run; the plan it went over to is not possible here, so another is taken"
        )
    return found or decision


def _trial_notices(recipe: Recipe) -> list[str]:
    """What a trial leaves undone although the recipe asks for it."""
    asked = [f"checkpoint.{name}" for name in ("every", "keep_best") if getattr(recipe.checkpoint, name) is not None]
    if recipe.run.keep or not asked:
        return []
    return [f"run.keep=false: a trial writes no checkpoint, so {' and '.join(asked)} do nothing"]


def _train(job: Job, decision: Decision, steps: int, space: Space) -> Result:
    """Trains, with a smaller plan each time that memory runs out."""
    writer = _open_metrics(job)
    try:
        while True:
            try:
                return _train_with(job, decision, steps, writer)
            except MemoryFullError as error:
                # The failed step's tensors hang on the frames of what this error came of.
                error.__context__ = None
                full = error.with_traceback(None)
            with job.stop, memory_named("saving after memory had run out"):
                decision = smaller_plan(job, decision, space, full)
            job = replace(job, plan=decision.plan)
            write_plan(job, decision)
    finally:
        if writer is not None:
            writer.close()


def _train_with(job: Job, decision: Decision, steps: int, writer: metrics.Metrics | None) -> Result:
    world = job.world
    evaluator = Evaluator(job.task, job.model, job.plan, world, job.precision, _interrupt(job), job.log.notice)
    memory.tidy(world.device)
    if job.progress.step == 0 and not job.progress.samples_before and job.recipe.evaluate.samples:
        with (
            job.peaks.during("answers"),
            memory_named("the sample answers before the first step"),
            job.update.visiting(),
        ):
            job.progress.samples_before = world.agree(lambda: finish.samples(job))
    with job.stop:
        Loop(job, evaluator, writer, steps).run()
        return _finish(job, decision)


def _open_metrics(job: Job) -> metrics.Metrics | None:
    """The writer, on rank 0. From here on the folder tells this run: figures of an earlier end are taken away."""
    opened: list[metrics.Metrics] = []

    def make() -> None:
        (job.folder / SUMMARY).unlink(missing_ok=True)
        settings = job.recipe.model_dump(mode="json")
        trackers = job.recipe.run.trackers
        opened.append(metrics.Metrics(job.folder, trackers, job.recipe.recipe, settings, job.progress.step))

    job.world.agree(make)
    return opened[0] if opened else None


def _finish(job: Job, decision: Decision) -> Result:
    """What a trained run leaves. Its last checkpoint is written, so a signal may end this at any point."""
    job.stop.at_once = True
    try:
        if job.world.sum([job.stop.asked is not None])[0]:
            raise StopAskedError(job.stop.asked or "a signal on another rank")
        summary = job.world.agree(lambda: _leave_result(job, decision))
    except StopAskedError as asked:
        raise StoppedError(
            f"stopped by {asked} after the last step, before the result was written; the state is saved",
            str(job.folder),
            f"go on with run.dir={job.folder} resume=auto",
        ) from None
    job.log.say(
        f"done: {summary['result'] or 'a trial, nothing is kept'}  ({job.progress.step} steps, {summary['tokens_per_s']:,.0f} tokens/s)"
    )
    return Result(job.folder, Path(summary["result"]) if summary["result"] else None, summary)


def _leave_result(job: Job, decision: Decision) -> dict[str, Any]:
    after: list[dict[str, str]] = []
    if job.recipe.evaluate.samples:
        with job.peaks.during("answers"), memory_named("the sample answers after the last step"), job.update.visiting():
            after = finish.samples(job)
    finish.show_samples(job, after)
    result = None
    if job.recipe.run.keep:
        with job.peaks.during("export"):
            result = export_result(job.model, job.recipe, job.folder, job.precision)
    summary = finish.summarize(job, decision, after, result)
    finish.write_json(job.folder / SUMMARY, summary)
    return summary


def choose_device(recipe: Recipe) -> str:
    """cuda where there is one, unless the recipe says cpu."""
    available = torch.cuda.is_available()
    if recipe.device == "cuda" and not available:
        raise InputError("no CUDA device is available", "device=cuda", "device=cpu, or check the driver")
    return "cuda" if available and recipe.device != "cpu" else "cpu"


def threads(world: World, launch: Launch, log: Log) -> None:
    """Uses every core on a CPU run of one process: accelerate's launcher sets one thread where nobody asked for that."""
    cores = detect("cpu").cores
    if world.device.type == "cpu" and world.size == 1 and launch.accelerate and torch.get_num_threads() < cores:
        log.notice(f"using {cores} CPU threads (the launcher had set {torch.get_num_threads()})")
        torch.set_num_threads(cores)


def rehearse(job: Job, decision: Decision) -> None:
    """Tries what could fail at the end before step 1: the folder, room for a checkpoint, the model's export."""
    trained = sum(p.numel() * p.element_size() for p in job.model.trainable().values())
    state_bytes = decision.estimate.phases["step"].causes.get("optimizer", 0)
    if job.recipe.run.keep:
        store.rehearse(job.checkpoints, 2 * trained + state_bytes)
        for notice in export.check_export(job.model):
            job.log.notice(notice)
    with writing(job.folder / "recipe.yaml"):
        save_recipe(job.recipe, job.folder / "recipe.yaml")
    write_plan(job, decision)


def write_plan(job: Job, decision: Decision) -> None:
    """Writes the plan in force, and the rates that it was made with, into the run's folder."""
    planned_with = stored(decision.rates, detect(job.world.device.type).name)
    write_text(job.folder / PLAN, _yaml({**asdict(job.plan), **planned_with}))


def _yaml(values: dict[str, Any]) -> str:
    import yaml

    plain = {key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}
    return yaml.safe_dump(plain, sort_keys=False)


def _interrupt(job: Job) -> Callable[[], None]:
    """What evaluation asks between batches: with several ranks a signal waits for the next step, which they agree on."""
    return job.stop.check if job.world.size == 1 else (lambda: None)


def export_result(model: Model, recipe: Recipe, folder: Path, precision: str) -> Path:
    """Writes the run's result: `adapter/`, or `model/` of a full fine-tune."""
    place = result_place(recipe, folder)
    if recipe.adapter.kind != "none":
        return export.export_adapter(model, place, tokens_of(recipe.model))
    return export.export_merged(model, place, DTYPES[precision])


def _is_complete(recipe: Recipe, folder: Path, progress: Progress, steps: int) -> bool:
    """Whether nothing is left to do: no step, and the result of the last one is there."""
    left = (folder / SUMMARY).exists() and result_place(recipe, folder).is_dir()
    return left and progress.complete and progress.ended(steps, recipe.train.stop_after)


def _already_complete(recipe: Recipe, folder: Path, progress: Progress, log: Log) -> Result:
    keys = "train.epochs or train.max_steps" + (", or train.stop_after," if recipe.train.stop_after else "")
    log.say(f"already complete at step {progress.step}: {folder}. Raise {keys} to go on.")
    return Result(folder, result_place(recipe, folder), finish.read_json(folder / SUMMARY))
