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

GRADIENTS_LEAVING = 2
"""Blocks whose gradients are on their way down while the next block's are made (memory/streaming/deferred.lower)."""


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
    visit = Bytes({"weights": ends.visiting}) + estimate.evaluation(case)
    flush = _Moments(case, figures, ends).flush()
    phases = {
        "load": Bytes({"weights": outside}) + max(made, checked, key=lambda moment: moment.total),
        "step": run + max(_Moments(case, figures, ends).all(), key=lambda moment: moment.total),
        # Both begin with the updates that were promised.
        "evaluate": run + max(visit, flush, key=lambda moment: moment.total),
        "save": run + flush,
    }
    fixed = estimate.fixed_bytes(plan)
    phases = estimate.with_products(phases, plan.device)
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
        return [*self._embedding(), *self._forward(), *self._head(), *self._backward(), self._update()]

    @property
    def _around(self) -> Bytes:
        """What stands when the last block is reached and left: the hidden states, the batches, boundaries that stay."""
        return self._around_with(self.case.shape.blocks)

    def flush(self) -> Bytes:
        """Updates that pass without a forward: those that were promised, before weights are read."""
        if not self.figures.gradients:
            return Bytes()
        largest = max((t.elements for t in self.case.tensors if t.role not in ("embedding", "head")), default=0)
        return Bytes({"passing updates": self.figures.passing, "workspace": self._update_bytes(largest)})

    def _around_with(self, blocks: int) -> Bytes:
        """As `_around`, with the boundaries of the first `blocks` blocks."""
        plan, storage = self.case.plan, self.case.storage
        kept = 0 if plan.activation_offload else blocks * self.figures.boundary
        mask = activations.attention_mask(storage, self.case.work) * (self.case.step_rows if storage.packed else 1)
        batch = self._batch + self._tables
        return Bytes({"carry": self.figures.carry, "boundaries": kept, "batch": batch, "attention mask": mask})

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
    def _several(self) -> int:
        """1 where a step has more than one micro-batch."""
        return int(self.case.step_rows > self.case.plan.micro_batch)

    @property
    def _of_head(self) -> int:
        """Bytes of the gradient of a trained head, where that stays on the device until the update."""
        elsewhere = self.ends.head_passes or self.ends.head_comes
        shape, storage = self.case.shape, self.case.storage
        return storage.weight * shape.vocabulary * shape.hidden if storage.whole_head and not elsewhere else 0

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

    @property
    def _tables(self) -> int:
        """Rotary tables, which each micro-batch has of its own."""
        storage, work, plan = self.case.storage, self.case.work, self.case.plan
        parts = -(-self.case.step_rows // plan.micro_batch)
        each = 2 * self.case.shape.head_dim * (storage.compute if storage.fast else storage.stream) * work.length
        return parts * each * (work.rows if storage.packed else 1)

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
        shape, storage, work, plan = self.case.shape, self.case.storage, self.case.work, self.case.plan
        parts = -(-self.case.step_rows // plan.micro_batch)
        behind = min(streaming.BEHIND, (shape.blocks - 1) * parts)
        # What a block reads is what is carried, and a boundary where these stay; transformers' own blocks, when they are run
        # alone, have no embedding's output beside it, and autocast's copies of one block.
        same = (1 if storage.fast else 2) + (0 if plan.activation_offload else 1)
        casts = 0 if storage.fast else (shape.blocks - 1) * activations.cast_weights(shape, storage)
        own = Bytes(
            {
                "workspace": activations.forward_workspace(shape, storage, work) - same * self._each - casts,
                "decoded block": self._decoded,
                "boundaries": behind * self._each if plan.activation_offload else 0,
                "passing updates": self.figures.passing,
            }
        )
        # A frozen head comes while the last block computes.
        last = [] if storage.trained else [self._around + own + self._visit]
        return [self._around + own, *last]

    def _head(self) -> list[Bytes]:
        shape, storage, work, plan = self.case.shape, self.case.storage, self.case.work, self.case.plan
        ring = Bytes({"boundaries": min(2 * self._each, self.figures.boundary) if plan.activation_offload else 0})
        common = self._around + ring + self._visit
        norm = Bytes({"workspace": activations.norm_workspace(shape, storage, work)})
        if self.ends.head_passes:
            return [common + moment for moment in (*self.ends.head_moments(self.case), norm)]
        first = []
        if self.ends.head_comes and storage.trained:
            part = tall_rows(shape.vocabulary, shape.hidden) * shape.hidden
            work_bytes = self._update_bytes(part)
            first = [common + Bytes({"passing head": 2 * self.ends.part_with_update, "workspace": work_bytes})]
        # Its gradient stands from the first micro-batch's loss on; a loss's moments hold the one that it makes.
        own = self._of_head + (self.ends.head_comes if storage.trained else 0)
        losses = chunked_loss.loss_moments(shape, storage, work, plan.loss_chunk)
        after = [common + Bytes({"gradients": self._several * own}) + estimate.loss_of(moment) for moment in losses]
        return [*first, *after, common + Bytes({"gradients": own}) + norm]

    def _backward(self) -> list[Bytes]:
        """The last block's, with every boundary; the first one's, with every gradient that stays; and the first before which
        as many blocks' gradients as may be are on their way down."""
        shape, storage, work, plan = self.case.shape, self.case.storage, self.case.work, self.case.plan
        # A fast block keeps its input as it is, which is the boundary at hand, and the gradient of its output is what is carried.
        again = self._each if storage.fast and storage.stream == 2 else 0
        carried = self._each if storage.fast else 0
        own = Bytes(
            {
                "boundaries": (streaming.AHEAD + 1) * self._each if plan.activation_offload else 0,
                "recomputation": checkpointing.recomputed_bytes(shape, storage, work, True) - again,
                "workspace": activations.block_workspace(shape, storage, work) - carried,
                "decoded block": self._decoded,
            }
        )
        moments = []
        for left in (shape.blocks, max(1, shape.blocks - GRADIENTS_LEAVING), 1):
            done = shape.blocks - left
            # From the second micro-batch on the block's own stand while more are made, which the workspace holds.
            going = (min(GRADIENTS_LEAVING, done) + self._several) * self.figures.gradients
            # A head's gradient is on its way down during the last block's backward.
            visited = self.ends.head_comes if storage.trained and not done else 0
            moving = Bytes({"gradients": going + self._staying(done), "visiting head": visited})
            moments.append(self._around_with(left) + own + moving)
        return moments

    def _staying(self, done: int) -> int:
        """Bytes of gradients that stay on the device when so many blocks' backward is over: the head's, or adapters' so far."""
        if self.case.storage.trained:
            return self._of_head
        blocks = self.case.shape.blocks
        adapters = self._grown.total - self._of_head
        return self._of_head + adapters * min(done + self._several, blocks) // blocks

    def _update(self) -> Bytes:
        """The update of what stays on the device."""
        storage = self.case.storage
        work = self._update_bytes(self.case.largest)
        passed = Bytes({"carry": self.figures.carry if self.ends.embedding_passes and storage.trained else 0})
        return Bytes({"batch": self._batch, "workspace": max(work, self._of_head)}) + self._grown + passed
