"""What a recipe pins of its plan (`plan.*` keys), and which pins contradict it or are not built.

A pin is a promise: it is kept or refused with the reason, never bent.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from finetune.config.schema import Recipe
from finetune.contracts import Shape
from finetune.errors import InputError, NotBuiltError
from finetune.memory import host_embedding, step_in_backward
from finetune.memory.storage import Storage, why_not_fast
from finetune.memory.table import LEVERS, Lever
from finetune.optim.builders import SLICED

EVEN_PARTS = 64
"""Parts into which a step's rows are tried to be split evenly."""
BUILT: dict[str, tuple[Any, ...]] = {
    "compile": (False,),
    "shard": (1,),
    "tensor": (1,),
    "context": (1,),
}
"""Keys of plan.* whose choices are not built yet, with the values that this version keeps."""


def check_built(recipe: Recipe, shape: Shape, ranks: int, storage: Storage) -> None:
    """NotBuiltError or InputError for a pinned choice that this version or this launch cannot keep."""
    for field, kept in BUILT.items():
        value = getattr(recipe.plan, field)
        if value != "auto" and value not in kept:
            raise NotBuiltError(f"plan.{field}={_text(value)}", f"plan.{field}={_text(kept[0])}")
    _check_fast(recipe, shape)
    blocks = recipe.plan.resident_blocks
    if blocks not in ("auto", shape.blocks) and recipe.plan.weights != "streamed":
        raise InputError(
            f"plan.resident_blocks={blocks}, but only streamed weights leave blocks on the host",
            "plan.resident_blocks",
            f"plan.weights=streamed, or leave it auto: all {shape.blocks} blocks are resident",
        )
    if recipe.plan.slots != "auto" and recipe.plan.weights != "streamed":
        raise InputError(
            f"plan.slots={recipe.plan.slots}, but only streamed weights pass through slots",
            "plan.slots",
            "plan.weights=streamed, or leave it auto",
        )
    if recipe.plan.head_placement in ("host", "visit") and recipe.plan.weights != "streamed":
        does = "takes the head through the device in parts"
        if recipe.plan.head_placement == "visit":
            does = "brings the head to the device for its losses"
        raise InputError(
            f"plan.head_placement={recipe.plan.head_placement}, but only a streamed step {does}",
            "plan.head_placement",
            "plan.weights=streamed, or plan.head_placement=device",
        )
    if recipe.plan.weights == "streamed":
        _check_streamed(recipe, ranks)
        _check_counts(recipe, shape)
        _check_head(recipe, shape, storage)
    if recipe.plan.data not in ("auto", ranks):
        started = "1 process was" if ranks == 1 else f"{ranks} processes were"
        raise InputError(
            f"plan.data={recipe.plan.data}, but {started} started",
            where="plan.data",
            remedy=f"accelerate launch --num_processes {recipe.plan.data}, or leave plan.data auto",
        )


def _check_fast(recipe: Recipe, shape: Shape) -> None:
    """Pins of fast blocks that they cannot keep. Which device there is decides only where nothing is pinned."""
    reason = why_not_fast(shape, recipe)
    if recipe.plan.fast_block is True and reason:
        raise InputError(f"plan.fast_block=true {reason}", "plan.fast_block", "plan.fast_block=auto or false")
    if recipe.plan.attention not in ("auto", "deterministic") and recipe.data.pack:
        raise InputError(
            f"plan.attention={recipe.plan.attention} names a kernel for rows of one document, and data.pack=true packs them",
            "plan.attention, data.pack",
            "plan.attention=auto or deterministic, or data.pack=false",
        )
    off = recipe.plan.fast_block is False or (recipe.plan.fast_block == "auto" and bool(reason))
    if recipe.plan.attention != "auto" and off:
        raise InputError(
            f"plan.attention={recipe.plan.attention} is for fast blocks, and they are off here",
            "plan.attention",
            "plan.attention=auto; model.attention chooses transformers' own",
        )


def why_not_streamed(recipe: Recipe, ranks: int) -> tuple[str, str]:
    """Why weights cannot be streamed, as the end of a sentence, and what to do; empty where they can."""
    reason, remedy = "", "plan.weights=resident"
    if ranks > 1:
        reason = f"is for one process, and {ranks} were started"
    elif recipe.adapter.kind == "none" and recipe.model.precision == "fp16":
        reason, remedy = "updates weights when they are fetched, and fp16 skips updates", "model.precision=bf16"
    elif recipe.train.last_blocks or recipe.train.modules or recipe.train.freeze:
        reason = "trains every parameter or an adapter, and train.last_blocks, modules or freeze choose a part"
    elif recipe.adapter.kind == "none" and recipe.optimizer.name not in SLICED:
        reason = f"updates tensors slice by slice, which {recipe.optimizer.name} cannot"
        remedy = f"optimizer.name={', '.join(SLICED)}, or plan.weights=resident"
    elif recipe.plan.activation_checkpointing not in ("auto", True):
        reason, remedy = "recomputes every block", "plan.activation_checkpointing=true or auto"
    elif recipe.plan.optimizer_in_backward is True or recipe.plan.optimizer_placement == "host":
        reason = "updates blocks when they are fetched, and optimizer state of blocks is on the host already"
        remedy = "plan.optimizer_in_backward=auto, plan.optimizer_placement=auto"
    return reason, remedy if reason else ""


def _check_streamed(recipe: Recipe, ranks: int) -> None:
    reason, remedy = why_not_streamed(recipe, ranks)
    if reason:
        raise InputError(f"plan.weights=streamed {reason}", "plan.weights", remedy)


def _check_counts(recipe: Recipe, shape: Shape) -> None:
    """Pinned numbers of blocks that the model does not have."""
    for field in ("resident_blocks", "slots"):
        count = getattr(recipe.plan, field)
        if count != "auto" and count > shape.blocks:
            raise InputError(
                f"plan.{field}={count}, but {shape.name} has {shape.blocks} blocks",
                f"plan.{field}",
                f"plan.{field}={shape.blocks} or less, or leave it auto",
            )


def _check_head(recipe: Recipe, shape: Shape, storage: Storage) -> None:
    """What a head on the host cannot keep, and what plan.exact=bitwise says of both ends."""
    plan = recipe.plan
    roles = {role for _, role in storage.part.tensors} if storage.part is not None and not storage.trained else set()
    if plan.head_placement == "visit":
        _check_visit(shape, storage.head_adapted or "head" in roles)
    in_parts = plan.head_placement == "host"
    field, reason = "head_placement", ""
    if plan.exact == "bitwise" and in_parts:
        reason = "gives reordered sums, which plan.exact=bitwise forbids"
    elif plan.exact == "bitwise" and plan.embedding_placement == "host" and (storage.trained or shape.tied):
        field, reason = "embedding_placement", "gives reordered sums, which plan.exact=bitwise forbids"
    elif shape.tied and {plan.head_placement, plan.embedding_placement} == {"device", "host"}:
        field = "head_placement" if in_parts else "embedding_placement"
        reason = f"contradicts the other end's placement: {shape.name} has one matrix for embedding and head"
    elif in_parts and shape.changed_logits:
        reason = f"is for logits as the head gives them, and {shape.name} changes its own (a cap or a scale)"
    elif in_parts and (storage.head_adapted or "head" in roles):
        reason = "is for a head of one matrix, and this one has an adapter, trained rows or a trained copy"
    elif in_parts and shape.tied and (storage.embedding_adapted or "embedding" in roles):
        reason = "takes the embedding that it shares along, and that one has an adapter, trained rows or a trained copy"
    elif in_parts and shape.tied and not storage.fast:
        reason = f"takes the embedding that {shape.name} shares with it along, which only fast blocks can (plan.fast_block=true)"
    if reason:
        raise InputError(f"plan.{field}=host {reason}", f"plan.{field}", f"plan.{field}=device")


def _check_visit(shape: Shape, adapted: bool) -> None:
    """What a head that visits the device cannot be."""
    reason, remedy = "", "plan.head_placement=device"
    if shape.tied:
        reason = f"is for a head of its own, and {shape.name} has one matrix for embedding and head"
        remedy = "plan.head_placement=host plan.embedding_placement=host (in parts), or device"
    elif adapted:
        reason = "is for a head of one matrix, and this one has an adapter, trained rows or a trained copy"
    if reason:
        raise InputError(f"plan.head_placement=visit {reason}", "plan.head_placement", remedy)


def micro_batches(recipe: Recipe, rows: int, ranks: int) -> list[int]:
    """Rows a forward pass that are worth trying, largest first: the sizes that split one rank's `rows` most evenly into up
    to EVEN_PARTS parts, and below those the powers of two, so that a huge batch is planned as fast as a small one."""
    pinned = recipe.plan.micro_batch
    if pinned == "auto":
        few = {-(-rows // parts) for parts in range(1, min(rows, EVEN_PARTS) + 1)}
        many = {2**power for power in range(rows.bit_length()) if 2**power <= rows}
        return sorted(few | many if rows > EVEN_PARTS else few, reverse=True)
    if recipe.train.batch is not None and pinned > rows:
        raise InputError(
            f"plan.micro_batch={pinned}, but a process gets only {rows} of a step's {recipe.train.batch} rows",
            where="plan.micro_batch",
            remedy=f"plan.micro_batch={rows} or less, or a larger train.batch (on {ranks} processes)",
        )
    return [pinned]


@dataclass(frozen=True)
class Allowance:
    """What decides which values of a lever are exact for a recipe."""

    recipe: Recipe
    shape: Shape
    storage: Storage
    precision: str
    ranks: int


def why_off(lever: Lever, allowance: Allowance) -> str:
    """Why a lever is never taken for a recipe on this device, as the end of a sentence; empty where it may be."""
    if lever.to_host and allowance.storage.device == "cpu":
        return "has no use on a CPU, whose memory is the host's"
    return _forbidden(lever, allowance)


def lever_choices(lever: Lever, allowance: Allowance) -> tuple[Any, ...]:
    """The values of a lever that may be tried: its pin, or all that the recipe allows and that can help."""
    pinned = getattr(allowance.recipe.plan, lever.field)
    reason = _forbidden(lever, allowance)
    if pinned == "auto":
        helps = not (lever.to_host and allowance.storage.device == "cpu")
        choices = (lever.off,) if reason or not helps else lever.choices
        return tuple(value for value in choices if not _senseless(value, allowance))
    reason = reason or _senseless(pinned, allowance)
    if pinned != lever.off and reason:
        raise InputError(
            f"plan.{lever.field}={_text(pinned)} {reason}",
            where=f"plan.{lever.field}",
            remedy=_before_tiles(lever, allowance)
            + " or ".join(f"plan.{lever.field}={_text(value)}" for value in _others(lever, pinned, allowance)),
        )
    return (pinned,)


def _others(lever: Lever, pinned: Any, allowance: Allowance) -> list[Any]:
    """The values of a lever that would be kept: all that are possible here, else off alone."""
    if _forbidden(lever, allowance):
        return [lever.off]
    return [value for value in lever.choices if value != pinned and not _senseless(value, allowance)]


def _forbidden(lever: Lever, allowance: Allowance) -> str:
    """Why a lever has to be off, as the end of a sentence; empty where it may be on."""
    recipe, storage = allowance.recipe, allowance.storage
    if recipe.plan.exact == "bitwise" and lever.exact != "bitwise":
        return f"gives {lever.exact}, which plan.exact=bitwise forbids"
    if lever.field == "loss_chunk" and storage.head_adapted and storage.dropout:
        return "would change the draws of the dropout on the head's adapter"
    if lever.field == "mlp_tile":
        return _untiled(allowance)
    if lever.field == "optimizer_in_backward":
        return step_in_backward.refusal(recipe, allowance.precision, allowance.ranks)
    if lever.field == "embedding_placement":
        return _embedding_refusal(allowance)
    return ""


def _untiled(allowance: Allowance) -> str:
    """Why no MLP goes in tiles, as the end of a sentence."""
    plan = allowance.recipe.plan
    if not allowance.storage.fast:
        return "is for fast blocks, and they are off here"
    if plan.activation_checkpointing not in ("auto", True):
        return (
            "is for blocks that are run again for their backward, and "
            f"plan.activation_checkpointing={_text(plan.activation_checkpointing)} keeps what the MLP makes"
        )
    return ""


def _before_tiles(lever: Lever, allowance: Allowance) -> str:
    """What makes tiles possible where they are refused, as the beginning of a remedy."""
    if lever.field != "mlp_tile" or allowance.recipe.plan.exact == "bitwise":
        return ""
    if allowance.storage.fast:
        return "plan.activation_checkpointing=true or "
    return "" if why_not_fast(allowance.shape, allowance.recipe) else "plan.fast_block=true or "


def _embedding_refusal(allowance: Allowance) -> str:
    """Fast blocks are given their input, so a streamed step can take any embedding of one matrix through the device."""
    shape, storage = allowance.shape, allowance.storage
    reason = host_embedding.refusal(shape, storage)
    if not reason or allowance.recipe.plan.weights != "streamed":
        return reason
    other = host_embedding.refusal(replace(shape, tied=False), replace(storage, trained=False))
    if other or storage.fast:
        return other
    return f"{reason}; with fast blocks (plan.fast_block=true) a streamed step can do that"


def _senseless(value: Any, allowance: Allowance) -> str:
    if value == "selective" and allowance.storage.eager:
        return "keeps the output of torch's attention operations, which model.attention=eager does not use"
    if value == "selective" and allowance.storage.fast:
        return "is not what fast blocks do (plan.fast_block=false runs transformers' own, which can)"
    return ""


def pinned_fields(recipe: Recipe) -> list[str]:
    """The mechanics that the recipe pins, as `plan.field=value`."""
    fields = ["micro_batch", *(lever.field for lever in LEVERS.values())]
    values = {field: getattr(recipe.plan, field) for field in fields}
    return [f"plan.{field}={_text(value)}" for field, value in values.items() if value != "auto"]


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
