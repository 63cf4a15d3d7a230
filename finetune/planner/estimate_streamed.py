"""Bytes by cause for each phase of a run whose blocks are streamed, as planner/estimate_resident gives them for a resident one.

The moments are other ones, since all micro-batches pass a block before the next: the embedding, forward of a block (with
updates that pass by), the head, backward of a block. Between them the hidden states of all micro-batches stand.
"""

from __future__ import annotations

from dataclasses import dataclass

from finetune.contracts import Bytes
from finetune.kernels.norms import tall_rows
from finetune.memory import activations, checkpointing, chunked_loss
from finetune.memory import weight_streaming as streaming
from finetune.memory.case import Case
from finetune.memory.storage import weight_bytes
from finetune.planner import estimate_resident as estimate


def estimate_streamed(case: Case) -> estimate.Estimate:
    """The estimate of a case whose plan streams."""
    shape, storage, plan = case.shape, case.storage, case.plan
    figures, ends = streaming.streaming_of(case), streaming.ends_of(case)
    outside = weight_bytes(shape, storage) - shape.blocks * figures.block - ends.weights
    state = case.state - shape.blocks * figures.state - ends.state
    # Adapters hardly count beside a block; a model's own norm does not at all.
    weights = Bytes({"weights": outside, "slots": streaming.slots_bytes(case)})
    run = weights + Bytes({"optimizer": state})
    # What is made on the device goes to the host one by one; the checks of a loaded model have its head on the device.
    made = Bytes({"slots": figures.block, "workspace": estimate.staging_bytes(shape, storage)})
    checked = Bytes({"slots": streaming.slots_bytes(case), "workspace": ends.checked})
    # Evaluation has what passes in parts whole on the device.
    visit = Bytes({"weights": ends.visiting})
    phases = {
        "load": Bytes({"weights": outside}) + max(made, checked, key=lambda moment: moment.total),
        "step": run + max(_Moments(case, figures, ends).all(), key=lambda moment: moment.total),
        "evaluate": run + visit + estimate.evaluation(case),
        "save": run,
    }
    fixed = estimate.fixed_bytes(plan)
    phases = {name: estimate.with_allocator(phase, plan.device) + fixed for name, phase in phases.items()}
    parked = Bytes(streaming.host_bytes(case))
    if plan.device == "cpu":
        phases = {name: phase + parked for name, phase in phases.items()}
        return estimate.Estimate(phases, max(phases.values(), key=lambda phase: phase.total))
    staging = Bytes({"process": estimate.HOST_PROCESS["cuda"], "staging": figures.block})
    return estimate.Estimate(phases, staging + parked)


@dataclass(frozen=True)
class _Moments:
    """What stands at once at the moments of a step, beside weights, slots and the state that stays on the device."""

    case: Case
    figures: streaming.Streaming
    ends: streaming.StreamedEnds

    def all(self) -> list[Bytes]:
        return [*self._embedding(), *self._forward(), *self._head(), self._backward(), self._update()]

    @property
    def _around(self) -> Bytes:
        """What stands from the first block to the last and back: the hidden states, the batches, boundaries that stay."""
        plan, storage = self.case.plan, self.case.storage
        kept = 0 if plan.activation_offload else self.case.shape.blocks * self.figures.boundary
        mask = activations.attention_mask(storage, self.case.work) * (self.case.step_rows if storage.packed else 1)
        return Bytes({"carry": self.figures.carry, "boundaries": kept, "batch": self._batch, "attention mask": mask})

    @property
    def _each(self) -> int:
        """Bytes of one micro-batch's boundary."""
        return self.case.work.tokens * activations.boundary(self.case.shape, self.case.storage)

    @property
    def _grown(self) -> Bytes:
        """Gradients that stay on the device."""
        return Bytes(
            {"gradients": self.case.gradients - self.case.shape.blocks * self.figures.gradients - self.ends.gradients}
        )

    @property
    def _decoded(self) -> int:
        """A block stored in 4 or 8 bits, decoded for its turn, in the place of its largest matrix alone."""
        shape, storage = self.case.shape, self.case.storage
        if not (storage.coded and storage.fast):
            return 0
        largest = max((linear.parameters for linear in shape.linears), default=0)
        return storage.compute * (shape.linear_parameters - largest)

    @property
    def _batch(self) -> int:
        """Ids and labels of all micro-batches, with document ids and positions where rows are packed; int64."""
        return self.case.step_tokens * 8 * (4 if self.case.storage.packed else 2)

    def _update_bytes(self, elements: int) -> int:
        """Temporaries of the update of a tensor of so many elements."""
        return (self.case.update_bytes or estimate.torch_update_bytes)(elements, self.case.plan.device)

    def _embedding(self) -> list[Bytes]:
        """The lookup of an embedding that passes in parts, with its update; and its gradient at the end."""
        if not self.ends.embedding_passes:
            return []
        carry = self.figures.carry
        ring = Bytes({"passing embedding": 2 * self.ends.part_with_update})
        made = self.ends.part if self.case.storage.trained else 0
        first = Bytes({"carry": 2 * carry, "workspace": made, "batch": self._batch})
        # The last step's gradient of the first hidden states is there until the update is made.
        kept = Bytes({"gradients": carry if self.case.storage.trained else 0})
        last = Bytes({"carry": 2 * carry, "workspace": made, "batch": self._batch})
        return [first + ring + kept, last + self._grown]

    @property
    def _visit(self) -> Bytes:
        """A head that is whole on the device, in the place of slots."""
        return Bytes({"visiting head": self.ends.head_comes, "slots": -streaming.lent_bytes(self.case)})

    def _forward(self) -> list[Bytes]:
        shape, storage, work = self.case.shape, self.case.storage, self.case.work
        leaving = streaming.BEHIND * self._each if self.case.plan.activation_offload else 0
        own = Bytes(
            {
                "workspace": activations.forward_workspace(shape, storage, work),
                "decoded block": self._decoded,
                "boundaries": leaving,
                "passing updates": self.figures.passing,
            }
        )
        # A frozen head comes while the last block computes.
        last = [] if storage.trained else [self._around + own + self._visit]
        return [self._around + own, *last]

    def _head(self) -> list[Bytes]:
        shape, storage, work, plan = self.case.shape, self.case.storage, self.case.work, self.case.plan
        ring = Bytes({"boundaries": min(2 * self._each, self.figures.boundary) if plan.activation_offload else 0})
        common = self._around + self._grown + ring + self._visit
        norm = Bytes({"workspace": activations.norm_workspace(shape, storage, work)})
        if self.ends.head_passes:
            return [common + moment for moment in (*self.ends.head_moments(self.case), norm)]
        first = []
        if self.ends.head_comes and storage.trained:
            part = tall_rows(shape.vocabulary, shape.hidden) * shape.hidden
            work_bytes = self._update_bytes(part)
            first = [common + Bytes({"passing head": 2 * self.ends.part_with_update, "workspace": work_bytes})]
            common += Bytes({"gradients": self.ends.head_comes})
        loss, slope = chunked_loss.loss_moments(shape, storage, work, plan.loss_chunk)
        again = Bytes({"workspace": storage.weight * shape.vocabulary * shape.hidden if storage.whole_head else 0})
        after = [common + estimate.loss_of(moment) + again for moment in (loss, slope)]
        return [*first, *after, common + norm]

    def _backward(self) -> Bytes:
        shape, storage, work = self.case.shape, self.case.storage, self.case.work
        several = 1 if self.case.step_rows > self.case.plan.micro_batch else 0
        largest = max((linear.parameters for linear in shape.linears), default=0)
        held = streaming.AHEAD + 1
        own = Bytes(
            {
                "boundaries": held * self._each if self.case.plan.activation_offload else 0,
                "recomputation": checkpointing.recomputed_bytes(shape, storage, work, True),
                "workspace": activations.block_workspace(shape, storage, work),
                "decoded block": self._decoded,
                # Those of the block before are on their way down; from the second micro-batch on, the block's own
                # stand whole while one more of a matrix is made.
                "gradients": self.figures.gradients + several * (self.figures.gradients and storage.weight * largest),
                # Its gradient is on its way down during the last block's backward.
                "visiting head": self.ends.head_comes if storage.trained else 0,
            }
        )
        return self._around + self._grown + own

    def _update(self) -> Bytes:
        """The update of what stays on the device."""
        storage = self.case.storage
        work = self._update_bytes(self.case.largest)
        head = self.case.shape.vocabulary * self.case.shape.hidden
        elsewhere = self.ends.head_passes or self.ends.head_comes
        again = storage.weight * head if storage.whole_head and not elsewhere else 0
        passed = Bytes({"carry": self.figures.carry if self.ends.embedding_passes and storage.trained else 0})
        return Bytes({"batch": self._batch, "workspace": max(work, again)}) + self._grown + passed
