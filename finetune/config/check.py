"""Rules over two and more fields of a recipe, and what the launcher adds to one.

Each rule is a generator that yields what contradicts; `RULES` lists them. The tables' names (optimizers, templates, ...)
are handed in, since this room lies below the rooms that own them. A rule never changes a recipe: `resolve_launch` does, and
only where the recipe leaves a choice open.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from finetune.config import methods
from finetune.config.keys import nearest, show
from finetune.config.problems import Problem, Problems
from finetune.config.schema import Recipe
from finetune.environment import Launch
from finetune.errors import Fault

TRACKERS = ("tensorboard", "wandb", "trackio", "mlflow")

NOT_BUILT: dict[str, tuple[object, ...]] = {
    "plan.compile": ("auto", False),
    "plan.shard": ("auto", 1),
    "plan.tensor": ("auto", 1),
    "plan.context": ("auto", 1),
}
"""Plan choices that this version lacks: the values that it does have."""

LAUNCHED_PRECISIONS = ("bf16", "fp16")
"""Values of the launcher's --mixed_precision that are followed."""


@dataclass(frozen=True)
class Known:
    """The names that recipes may use, as the rooms that own them list them."""

    optimizers: tuple[str, ...]
    schedules: tuple[str, ...]
    templates: tuple[str, ...]
    trackers: tuple[str, ...] = TRACKERS
    optimizer_keys: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """By optimizer: the keys of its section that only some optimizers use and this one does."""
    fp32_optimizers: tuple[str, ...] = ()
    """Optimizers that train fp32 weights only."""


def check(recipe: Recipe, known: Known | None, launch: Launch) -> list[Fault]:
    """Everything that contradicts in a recipe whose fields are right one by one."""
    return [Fault(", ".join(p.keys), p.what, p.remedy) for p in problems(recipe, known, launch)]


def problems(recipe: Recipe, known: Known | None, launch: Launch) -> list[Problem]:
    """As `check`, with the keys apart. Without `known` no name is checked."""
    found = [problem for rule in RULES for problem in rule(recipe)]
    if known is not None:
        found += [*_names(recipe, known), *_optimizer(recipe, known)]
    for rule_of_launch in LAUNCH_RULES:
        found += rule_of_launch(recipe, launch)
    return found


def _batch(recipe: Recipe) -> Problems:
    train, data = recipe.train, recipe.data
    if train.batch is None and train.batch_tokens is None:
        what = "nothing says how much data makes one step"
        yield Problem(("train.batch",), what, "give train.batch (rows) or train.batch_tokens (tokens)")
    if train.batch is not None and train.batch_tokens is not None:
        what = f"both are given: {train.batch} rows and {train.batch_tokens} tokens a step"
        yield Problem(("train.batch", "train.batch_tokens"), what, "keep one; the other can be unset with =null")
    elif train.batch_tokens is not None and train.batch_tokens < data.max_tokens:
        what = f"a step of {train.batch_tokens} tokens cannot hold one row of {data.max_tokens}"
        remedy = f"raise train.batch_tokens to at least {data.max_tokens}, or lower data.max_tokens"
        yield Problem(("train.batch_tokens", "data.max_tokens"), what, remedy)


def _trained(recipe: Recipe) -> Problems:
    trained = recipe.model.trained
    if trained == "fp32":
        return
    if recipe.adapter.kind != "none":
        what = f"trained weights are to be kept as {trained}, but adapter.kind={recipe.adapter.kind} trains adapters in fp32"
        yield Problem(("model.trained", "adapter.kind"), what, "leave model.trained out, or write adapter.kind=none")
    if recipe.model.precision == "fp32":
        what = f"model.trained={trained} keeps weights in bf16, and products are to be made in fp32"
        remedy = "write model.precision=bf16, or model.trained=fp32"
        yield Problem(("model.trained", "model.precision"), what, remedy, training=True)


def _rate(recipe: Recipe) -> Problems:
    optimizer = recipe.optimizer
    if optimizer.scale_lr != "none" and optimizer.base_batch is None:
        what = "the rate is to be scaled with the batch, and nothing says which batch it belongs to"
        yield Problem(("optimizer.scale_lr", "optimizer.base_batch"), what, "give optimizer.base_batch")
    if optimizer.scale_lr == "none" and optimizer.base_batch is not None:
        what = f"base_batch is {optimizer.base_batch}, and the rate is not scaled"
        yield Problem(
            ("optimizer.base_batch", "optimizer.scale_lr"),
            what,
            "write optimizer.scale_lr=linear or sqrt, or leave it out",
        )


def _data(recipe: Recipe) -> Problems:
    data = recipe.data
    if data.path is None and not data.mixture:
        yield Problem(("data.path",), "no data are named", "give data.path=FILE or a hub data set's id")
    if data.path is not None and data.mixture:
        what = f"one file is given ({data.path}), and a mixture of {len(data.mixture)}"
        yield Problem(("data.path", "data.mixture"), what, "keep one; the other can be unset with data.path=null")
    if data.valid_path is not None and data.valid_share > 0:
        what = f"held-out rows are given ({data.valid_path}), and a share of {data.valid_share:g} of the training rows"
        yield Problem(("data.valid_path", "data.valid_share"), what, "keep one")
    if "valid" in recipe.evaluate.sets:
        what = "valid is the name of the rows of data.valid_path"
        yield Problem(("evaluate.sets.valid",), what, "give this set another name")


def _mixture(recipe: Recipe) -> Problems:
    data = recipe.data
    for name in data.weights:
        if name not in data.mixture:
            what = f"a weight is given for {name!r}, which is no file of the mixture"
            yield Problem(
                (f"data.weights.{name}",), what, f"data.mixture names: {', '.join(data.mixture) or 'nothing'}"
            )
    lacking = [name for name in data.mixture if name not in data.weights] if data.weights else []
    if lacking:
        what = f"weights are given, and none for {', '.join(lacking)}"
        yield Problem(("data.weights",), what, "give every file of the mixture a weight, or none")
    if data.on_exhausted != "stop" and not data.weights:
        what = "nothing runs out: without data.weights every row comes once an epoch"
        yield Problem(("data.on_exhausted",), what, "give data.weights, or leave it out")


def _streaming(recipe: Recipe) -> Problems:
    data, train = recipe.data, recipe.train
    if not data.streaming:
        if data.shuffle_buffer != type(data).model_fields["shuffle_buffer"].default:
            what = "rows that are not streamed are shuffled all together"
            yield Problem(("data.shuffle_buffer",), what, "write data.streaming=true, or leave it out")
        return
    if train.max_steps is None:
        what = "how many rows a stream has is not known before its end"
        yield Problem(("data.streaming", "train.max_steps"), what, "give train.max_steps")
    if train.epochs is not None:
        what = "how many steps an epoch of a stream has is not known before its end"
        yield Problem(("data.streaming", "train.epochs"), what, "give train.max_steps alone")
    if data.valid_share > 0:
        what = "a share of a stream cannot be held out, since its rows are not counted before"
        yield Problem(("data.streaming", "data.valid_share"), what, "give data.valid_path")
    if data.mixture:
        what = "a mixture cannot be streamed: its rows are drawn from files that are all at hand"
        yield Problem(("data.streaming", "data.mixture"), what, "leave out one of the two")


def metrics(recipe: Recipe) -> tuple[str, ...]:
    """The evaluation metrics that this recipe's held-out sets give."""
    held_out = recipe.data.valid_path is not None or recipe.data.valid_share > 0
    return (("eval_loss",) if held_out else ()) + tuple(f"{name}/eval_loss" for name in recipe.evaluate.sets)


def _evaluation(recipe: Recipe) -> Problems:
    given, every = metrics(recipe), recipe.evaluate.every
    best = recipe.checkpoint.keep_best
    hold_out = "give data.valid_path or data.valid_share"
    if every is not None and not given:
        yield Problem(("evaluate.every",), "there are no held-out rows to evaluate on", hold_out)
    if best is not None and best not in given:
        what = f"no evaluation set gives a metric {best!r}"
        close = nearest(best, given)
        remedy = f"did you mean {close}?" if close else f"this recipe gives: {', '.join(given) or f'none; {hold_out}'}"
        yield Problem(("checkpoint.keep_best",), what, remedy)
    if best is not None and every is None:
        what = "the best checkpoint is to be kept, and nothing is evaluated between the first step and the last"
        yield Problem(("checkpoint.keep_best", "evaluate.every"), what, "give evaluate.every=STEPS")
    if recipe.evaluate.max_rows is not None and not given:
        yield Problem(("evaluate.max_rows",), "there are no held-out rows to evaluate on", hold_out)
    if recipe.train.stop_after is not None:
        if every is None:
            what = f"the run is to stop after {recipe.train.stop_after} evaluations without gain, and none is asked for"
            yield Problem(("train.stop_after", "evaluate.every"), what, "give evaluate.every=STEPS")
        if "eval_loss" not in given:
            what = "the run is to stop by eval_loss, and there are no held-out rows"
            yield Problem(("train.stop_after",), what, hold_out)


def _built(recipe: Recipe) -> Problems:
    for name, values in NOT_BUILT.items():
        section, _, leaf = name.partition(".")
        value = getattr(getattr(recipe, section), leaf)
        if value not in values:
            what = f"{name}={show(value)} is not built yet in this version"
            yield Problem((name,), what, f"leave it out, or write {name}={show(values[-1])}")


def _schedule(recipe: Recipe) -> Problems:
    schedule = recipe.schedule
    if schedule.name == "constant" and schedule.final != type(schedule).model_fields["final"].default:
        what = f"the rate is to end at {schedule.final:g} of its peak, and to stay constant"
        yield Problem(
            ("schedule.final", "schedule.name"), what, "write schedule.name=linear or cosine, or leave one out"
        )
    if (
        schedule.name == "wsd"
        and schedule.decay == 0
        and schedule.final != type(schedule).model_fields["final"].default
    ):
        what = f"the rate is to end at {schedule.final:g} of its peak, and schedule.decay=0 leaves no step for it"
        yield Problem(("schedule.final", "schedule.decay"), what, "give schedule.decay, or leave schedule.final out")
    if schedule.name != "wsd" and schedule.decay != type(schedule).model_fields["decay"].default:
        what = f"schedule.decay is {schedule.decay:g}, and {schedule.name} has no part of its own for it"
        yield Problem(("schedule.decay", "schedule.name"), what, "write schedule.name=wsd, or leave schedule.decay out")


def _trial(recipe: Recipe) -> Problems:
    if not recipe.run.keep and recipe.resume is not None:
        what = (
            "a trial keeps nothing, and going on from a checkpoint would overwrite the figures of the run that it is of"
        )
        yield Problem(("run.keep", "resume"), what, "leave one of the two out")


def _levers(recipe: Recipe) -> Problems:
    """What no plan can keep; the planner knows the rest."""
    if recipe.plan.optimizer_in_backward is True:
        key, remedy = "plan.optimizer_in_backward", "leave one of the two out"
        if recipe.train.max_grad_norm is not None:
            what = f"updates in backward come before the gradient's norm is known, and it is clipped at {recipe.train.max_grad_norm:g}"
            yield Problem((key, "train.max_grad_norm"), what, "write train.max_grad_norm=none, or leave it out")
        if recipe.model.precision == "fp16":
            yield Problem((key, "model.precision"), "fp16 skips steps whose gradient overflows", remedy)
        if recipe.train.batch_tokens is not None:
            what = (
                "updates in backward need one micro-batch a step, and a step of so many tokens has as many rows as fit"
            )
            yield Problem((key, "train.batch_tokens"), what, "give train.batch")
    resident = recipe.plan.weights == "resident"
    if recipe.plan.embedding_placement == "host" and recipe.adapter.kind == "none" and resident:
        what = "only streamed weights train an embedding that is on the host, and adapter.kind is none"
        yield Problem(("plan.embedding_placement", "adapter.kind"), what, "leave one of the two out")


RULES: tuple[Callable[[Recipe], Problems], ...] = (
    _batch,
    methods.adapter,
    methods.base,
    _trained,
    _rate,
    _data,
    _mixture,
    _streaming,
    _schedule,
    _evaluation,
    _levers,
    _trial,
    _built,
)


def _names(recipe: Recipe, known: Known) -> Problems:
    """Names of table rows that no table has."""
    named = [
        ("optimizer.name", "optimizer", recipe.optimizer.name, known.optimizers),
        ("schedule.name", "schedule", recipe.schedule.name, known.schedules),
        *(("run.trackers", "tracker", name, known.trackers) for name in recipe.run.trackers),
    ]
    template = recipe.data.template
    if not ("/" in template or "\\" in template or template.endswith((".yaml", ".yml"))):
        named.append(("data.template", "template", template, known.templates))
    for key, kind, name, names in named:
        if name not in names:
            close = nearest(name, names)
            remedy = (f"did you mean {close}? " if close else "") + f"There are: {', '.join(sorted(names))}"
            yield Problem((key,), f"there is no {kind} {name!r}", remedy)


def _optimizer(recipe: Recipe, known: Known) -> Problems:
    """Keys that the chosen optimizer does not use, and weights that it cannot train."""
    section, name = recipe.optimizer, recipe.optimizer.name
    if name not in known.optimizer_keys:
        return
    some = {key for keys in known.optimizer_keys.values() for key in keys}
    for key in sorted(some - set(known.optimizer_keys[name])):
        value = getattr(section, key)
        if value != type(section).model_fields[key].default:
            what = f"optimizer.{key} is {show(value)}, and {name} does not use it"
            yield Problem((f"optimizer.{key}", "optimizer.name"), what, f"leave optimizer.{key} out")
    if recipe.model.trained != "fp32" and name in known.fp32_optimizers:
        able = ", ".join(sorted(set(known.optimizers) - set(known.fp32_optimizers)))
        what = f"{name} trains fp32 weights only, and model.trained is {recipe.model.trained}"
        yield Problem(("model.trained", "optimizer.name"), what, f"model.trained=fp32, or one of {able}")


def _launcher(launch: Launch, flag: str) -> str:
    """Where a value of the launcher comes from, in words."""
    if launch.settings_file is None:
        return f"the launcher's {flag}"
    return f"the launcher's {flag} (on its command line or in {launch.settings_file})"


def _launch_precision(recipe: Recipe, launch: Launch) -> Problems:
    wanted, own = launch.mixed_precision, recipe.model.precision
    key = "model.precision"
    if wanted is None:
        return
    source = _launcher(launch, f"--mixed_precision {wanted}")
    if wanted not in LAUNCHED_PRECISIONS:
        what = f"{wanted} is asked for by {source}; this program computes in bf16, fp16, tf32 or fp32"
        yield Problem((key,), what, "launch with --mixed_precision bf16, fp16 or no")
    elif own not in ("auto", wanted):
        what = f"the recipe says {own}, {source} says {wanted}"
        yield Problem((key,), what, f"launch with --mixed_precision no, or write {key}={wanted}")


def accumulated_rows(recipe: Recipe, launch: Launch) -> int | None:
    """The micro-batch that makes the launcher's accumulation steps: ceil(batch / (steps x processes)); None where it has none."""
    if launch.accumulation is None or recipe.train.batch is None:
        return None
    return math.ceil(recipe.train.batch / (launch.accumulation * launch.world))


def _launch_accumulation(recipe: Recipe, launch: Launch) -> Problems:
    steps, pinned = launch.accumulation, recipe.plan.micro_batch
    if steps is None:
        return
    source = _launcher(launch, f"--gradient_accumulation_steps {steps}")
    if recipe.train.batch is None and recipe.train.batch_tokens is not None:
        what = f"the step is {recipe.train.batch_tokens} tokens, and {source} cuts it by rows"
        remedy = "launch without accumulation steps (the plan cuts a step as the memory needs), or give train.batch"
        yield Problem(("train.batch_tokens",), what, remedy)
    rows = accumulated_rows(recipe, launch)
    if rows is not None and pinned not in ("auto", rows):
        what = (
            f"the recipe says {pinned}; {source} makes it {rows} "
            f"(train.batch {recipe.train.batch} over {steps} steps and {launch.world} processes)"
        )
        yield Problem(("plan.micro_batch",), what, "keep one of the two")


def _launch_processes(recipe: Recipe, launch: Launch) -> Problems:
    if recipe.plan.data not in ("auto", launch.world):
        what = f"the plan is pinned to {recipe.plan.data} processes, and the launcher started {launch.world}"
        remedy = f"launch with --num_processes {recipe.plan.data}, or leave plan.data out"
        yield Problem(("plan.data",), what, remedy)
    if launch.use_cpu and recipe.device == "cuda":
        what = f"the recipe says cuda, {_launcher(launch, '--cpu')} says cpu"
        yield Problem(("device",), what, "leave out one of the two")


def _launch_unfollowed(recipe: Recipe, launch: Launch) -> Problems:
    flags = ["--use_fsdp"] * launch.fsdp + ["--use_deepspeed"] * launch.deepspeed + list(launch.other)
    for flag in flags:
        if flag in ("--use_fsdp", "--use_parallelism_config"):
            what = "sharding (plan.shard, plan.tensor, plan.context) is not built yet in this version"
        elif flag.startswith("--dynamo_backend"):
            what = "compiling (plan.compile) is not built yet in this version"
        elif flag.startswith("mpirun"):
            what = "processes of mpirun do not find each other here"
        else:
            what = "this program does its own sharding and offloading, and does not run under it"
        yield Problem((), f"{_launcher(launch, flag)}: {what}", "start with torchrun or accelerate launch, without it")


LAUNCH_RULES: tuple[Callable[[Recipe, Launch], Problems], ...] = (
    _launch_precision,
    _launch_accumulation,
    _launch_processes,
    _launch_unfollowed,
)


def resolve_launch(recipe: Recipe, launch: Launch) -> Recipe:
    """The recipe with the choices that it leaves open and the launcher makes: precision, device, micro-batch.

    Promises nothing for a recipe and a launch that `check` finds fault with. Doing it twice changes nothing.
    """
    updates: dict[str, object] = {}
    if launch.mixed_precision in LAUNCHED_PRECISIONS and recipe.model.precision == "auto":
        updates["model"] = recipe.model.model_copy(update={"precision": launch.mixed_precision})
    if launch.use_cpu and recipe.device == "auto":
        updates["device"] = "cpu"
    rows = accumulated_rows(recipe, launch)
    if rows is not None and recipe.plan.micro_batch == "auto":
        updates["plan"] = recipe.plan.model_copy(update={"micro_batch": rows})
    return recipe.model_copy(update=updates) if updates else recipe
