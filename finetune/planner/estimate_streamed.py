"""Bytes by cause for each phase of a run whose blocks are streamed, as planner/estimate_resident gives them for a resident one.

The moments are other ones, since all micro-batches pass a block before the next: forward of a block (with updates that pass
by), the head of one micro-batch, backward of a block. Between them the hidden states of all micro-batches stand.
"""

from __future__ import annotations

from finetune.contracts import Bytes
from finetune.memory import activations, checkpointing, chunked_loss, fast_block, host_embedding
from finetune.memory import weight_streaming as streaming
from finetune.memory.case import Case
from finetune.planner import estimate_resident as estimate


def estimate_streamed(case: Case) -> estimate.Estimate:
    """The estimate of a case whose plan streams."""
    shape, storage, plan, work = case.shape, case.storage, case.plan, case.work
    figures = streaming.streaming_of(case)
    embedded = host_embedding.saves(case)
    outside = _outside_weights(case) - embedded
    state = case.state - shape.blocks * figures.state
    weights = Bytes({"weights": outside, "slots": streaming.slots_bytes(case)})
    run = weights + Bytes({"optimizer": state})
    loaded = Bytes({"workspace": estimate.staging_bytes(shape, storage) + embedded + figures.block})
    phases = {
        "load": weights + loaded,
        "step": run + max(_moments(case, figures), key=lambda moment: moment.total),
        "evaluate": run + estimate.evaluation(case),
        "save": run,
    }
    fixed = estimate.fixed_bytes(plan)
    phases = {name: estimate.with_allocator(phase, plan.device) + fixed for name, phase in phases.items()}
    parked = Bytes(streaming.host_bytes(case))
    if embedded:
        parked += Bytes({"parked embedding": embedded + host_embedding.staging_bytes(shape, storage, work)})
    if plan.device == "cpu":
        phases = {name: phase + parked for name, phase in phases.items()}
        return estimate.Estimate(phases, max(phases.values(), key=lambda phase: phase.total))
    staging = Bytes({"process": estimate.HOST_PROCESS["cuda"], "staging": figures.block})
    return estimate.Estimate(phases, staging + parked)


def _outside_weights(case: Case) -> int:
    """Bytes of weights that are not in blocks, and of adapters."""
    from finetune.memory.storage import weight_bytes

    return weight_bytes(case.shape, case.storage) - case.shape.blocks * streaming.block_bytes(case.shape, case.storage)


def _moments(case: Case, figures: streaming.Streaming) -> list[Bytes]:
    shape, storage, work, plan = case.shape, case.storage, case.work, case.plan
    kept = 0 if plan.activation_offload else shape.blocks * figures.boundary
    around = Bytes({"carry": figures.carry, "boundaries": kept, "batch": _batch(case)})
    each = work.tokens * activations.boundary(shape, storage)
    outside = case.gradients - shape.blocks * figures.gradients
    grown = Bytes({"gradients": outside})
    ring = Bytes({"boundaries": 2 * each if plan.activation_offload else 0})
    forward = Bytes({"workspace": activations.forward_workspace(shape, storage, work)})
    loss, slope = chunked_loss.loss_moments(shape, storage, work, plan.loss_chunk)
    if storage.fast:
        norm = fast_block.norm_workspace(shape, storage, work)
    else:
        norm = activations.norm_workspace(shape, storage, work)
    again = storage.weight * shape.vocabulary * shape.hidden if storage.whole_head else 0
    block = Bytes(
        {
            "recomputation": checkpointing.recomputed_bytes(shape, storage, work, True),
            "workspace": activations.block_workspace(shape, storage, work),
            "gradients": (streaming.GRADIENTS_LEAVING - 1) * figures.gradients,
        }
    )
    update = (case.update_bytes or estimate.torch_update_bytes)(case.largest, plan.device)
    first = Bytes({"gradients": 0})
    return [
        around + first + forward + Bytes({"passing updates": figures.passing}),
        around + grown + ring + estimate.loss_of(loss) + Bytes({"workspace": again}),
        around + grown + ring + estimate.loss_of(slope) + Bytes({"workspace": again}),
        around + grown + ring + Bytes({"workspace": norm}),
        around + grown + ring + block,
        Bytes({"batch": _batch(case), "gradients": outside, "workspace": max(update, again)}),
    ]


def _batch(case: Case) -> int:
    """Ids and labels of all micro-batches, with document ids and positions where rows are packed; int64."""
    return case.step_tokens * 8 * (4 if case.storage.packed else 2)
