"""Bytes by cause for each phase of a run whose weights stay on the device.

A step's peak is the largest of a few moments, each a sum of what then exists: the loss, the final norm's backward, the
first and the last block's backward, the optimizer's update. The cost models of levers and activations (memory/) give
the parts; this file only says which of them stand at the same time. On a CPU the device's memory is the host's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from finetune.contracts import Bytes, Plan, Shape
from finetune.memory import (
    activations,
    checkpointing,
    chunked_loss,
    host_embedding,
    host_optimizer,
    offload,
    step_in_backward,
)
from finetune.memory.case import Case
from finetune.memory.storage import Storage, Work, weight_bytes
from finetune.planner.hardware import CONTEXT_BYTES

StateBytes = Callable[[int, str], int]
"""Bytes of optimizer state of one tensor, by its elements and its role (`embedding`, `head` or another)."""

UpdateBytes = Callable[[int, str], int]
"""Bytes of temporaries of one tensor's update, by its elements and the device's type."""

HOST_PROCESS = {"cpu": 700 * 2**20, "cuda": 1792 * 2**20}
"""Resident bytes of a Python process with torch, transformers and peft loaded; 560 MiB measured on a CPU, 1.2 to 1.6 GiB
beside what is planned by name in whole streamed runs on an H200 (benchmarks/results/{rehearsal,frontier}.jsonl)."""
LOADING_TENSORS = 4
"""Tensors that may pass through host memory at once while weights are loaded and moved to a GPU."""
BESIDE_TENSORS = ("context", "allocator", "process")
"""Causes that are no tensors of the run."""
PRODUCTS_BYTES = 32 * 2**20
"""What torch gives cuBLAS for its products on a GPU of the Hopper kind, from the allocator; 8 MiB on older ones."""
ALLOCATOR_SHARE = 0.03
"""What a GPU's caching allocator leaves unused between tensors, as a share of those that come and go."""
HEAP_SHARE = 0.7
"""On a CPU: what glibc's heap leaves unused between tensors in a step, as a share of what all blocks' backward needs (kept
or made again). 0.5 to 0.7 measured with 135 M parameters at 1,024 and 2,048 tokens, checkpointing or not, and less below;
0 when every tensor has pages of its own (MALLOC_MMAP_THRESHOLD_), which takes a third more time."""
HEAP_TENSOR = 32 * 2**20
"""Larger tensors have pages of their own, which go back at once: glibc's largest threshold on 64 bits."""


@dataclass(frozen=True)
class Facts:
    """What an estimate needs beside shape, recipe and plan: `longest_row` in tokens, `precision` as resolved, `rows`
    of one rank's share of a step. `state_bytes` and `update_bytes` are the optimizer row's (none: those of torch's AdamW)."""

    longest_row: int
    precision: str
    state_bytes: StateBytes
    rows: int = 1
    update_bytes: UpdateBytes | None = None


@dataclass(frozen=True)
class Estimate:
    """Bytes by cause of one process. `phases` (load, step, evaluate, save) are the device's; `host` is the host's peak,
    which on a CPU is that of the widest phase."""

    phases: dict[str, Bytes]
    host: Bytes

    @property
    def step(self) -> int:
        """The step's peak on the device."""
        return self.phases["step"].total

    @property
    def step_tensors(self) -> int:
        """The step's tensors alone: what torch's allocator counts as allocated."""
        return self.tensors("step")

    def tensors(self, phase: str) -> int:
        """A phase's tensors alone."""
        return sum(count for cause, count in self.phases[phase].causes.items() if cause not in BESIDE_TENSORS)

    @property
    def peak(self) -> int:
        """The largest phase's peak on the device."""
        return max(phase.total for phase in self.phases.values())


def estimate_resident(case: Case, by_tokens: bool) -> Estimate:
    """The estimate of a case whose weights are resident. `by_tokens`: a step is so many tokens, of any number of rows."""
    shape, storage, plan = case.shape, case.storage, case.plan
    # Shorter rows than the longest make more micro-batches where a step is so many tokens.
    several = case.rows > plan.micro_batch or by_tokens
    parts = _Parts(case, case.gradients, step_in_backward.gradient_bytes(case), several)
    embedded = host_embedding.saves(case)
    weights = Bytes({"weights": weight_bytes(shape, storage) - embedded})
    hosted = host_optimizer.saves(case)
    largest = 4 * case.largest
    run = weights + Bytes({"optimizer": case.state - hosted})
    phases = {
        # Everything is loaded to the device first.
        "load": weights + Bytes({"workspace": staging_bytes(shape, storage) + embedded}),
        "step": run + parts.widest((case.update_bytes or torch_update_bytes)(case.largest, plan.device)),
        "evaluate": run + evaluation(case),
        "save": run + Bytes({"workspace": largest if plan.device == "cpu" else 0}),
    }
    fixed = fixed_bytes(plan)
    phases = with_products(phases, plan.device)
    phases = {name: with_allocator(phase, plan.device) + fixed for name, phase in phases.items()}
    parked = _parked(case, hosted, embedded)
    if plan.device == "cpu":
        phases = {name: phase if name == "load" else phase + parked for name, phase in phases.items()}
        phases["step"] += Bytes({"allocator": _heap(shape, storage, case.work)})
        return Estimate(phases, max(phases.values(), key=lambda phase: phase.total))
    largest_stored = max(shape.embedding_parameters, *(linear.parameters for linear in shape.linears), 1)
    staging = max(LOADING_TENSORS * largest_stored * (storage.weight if storage.trained else storage.frozen), largest)
    return Estimate(phases, Bytes({"process": HOST_PROCESS["cuda"], "staging": staging}) + parked)


def _parked(case: Case, hosted: int, embedded: int) -> Bytes:
    """What levers keep in host memory."""
    causes = {}
    if case.plan.activation_offload:
        mode = case.plan.activation_checkpointing
        causes["parked activations"] = offload.host_bytes(case.shape, case.storage, case.work, mode)
    if hosted:
        causes["parked optimizer"] = hosted
    if embedded:
        causes["parked embedding"] = embedded + host_embedding.staging_bytes(case.shape, case.storage, case.work)
    return Bytes(causes)


@dataclass(frozen=True)
class _Parts:
    """The bytes that come and go within a step. `gradients`: those of every trained tensor, of which at most
    `standing` exist at once; `several`: a step may have more than one micro-batch."""

    case: Case
    gradients: int
    standing: int
    several: bool

    def widest(self, update: int) -> Bytes:
        """The widest moment of a step."""
        return max(self._moments(update), key=lambda moment: moment.total)

    def _moments(self, update: int) -> list[Bytes]:
        shape, storage, work, plan = self.case.shape, self.case.storage, self.case.work, self.case.plan
        outside = Bytes({"activations": activations.saved_outside(shape, storage, work)})
        kept = self._kept(shape.blocks)
        forward, backward = chunked_loss.loss_moments(shape, storage, work, plan.loss_chunk)
        head = storage.weight * shape.vocabulary * shape.hidden if storage.whole_head else 0
        last = (
            0
            if not storage.trained or storage.part is not None
            else storage.weight * (shape.block_parameters + (0 if shape.tied else shape.embedding_parameters))
        )
        norm = Bytes({"workspace": activations.norm_workspace(shape, storage, work)})
        passing = self._passing()
        during = passing if plan.optimizer_in_backward else Bytes()
        moments = [
            kept + outside + loss_of(forward) + Bytes({"weight casts": self._forward_casts()}) + self._grown(0),
            kept + outside + loss_of(backward) + self._grown(0),
            kept + outside + norm + self._grown(head) + during,
            *(
                moment + self._grown(head + done * self._of_block()) + during
                for done, moment in enumerate(self._block_moments())
            ),
            self._kept(1) + self._block(True) + self._grown(self.gradients - last) + during,
        ]
        # A second gradient of the embedding or the head stands beside the first until it is added to it.
        again = head if self.several or shape.tied else 0
        update_at = Bytes({"gradients": self.standing, "workspace": max(update, again)}) + passing
        return [*moments, update_at]

    def _block_moments(self) -> list[Bytes]:
        """The last block's backward; where it keeps its activations, also that of the last block that is run again."""
        shape, mode = self.case.shape, self.case.plan.activation_checkpointing
        if checkpointing.kept_blocks(shape.blocks, mode) == checkpointing.kept_blocks(shape.blocks - 1, mode):
            return [self._kept(shape.blocks) + self._block(True)]
        first = [self._kept(shape.blocks) + self._block(False)]
        return first if mode is False else [*first, self._kept(shape.blocks - 1) + self._block(True)]

    def _of_block(self) -> int:
        """Gradients of one block."""
        shape, storage = self.case.shape, self.case.storage
        if storage.trained and storage.part is None:
            return storage.weight * shape.block_parameters
        ends = ("embedding", "head")
        return (
            storage.weight * sum(t.count * t.elements for t in self.case.tensors if t.role not in ends) // shape.blocks
        )

    def _block(self, again: bool) -> Bytes:
        shape, storage, work, plan = self.case.shape, self.case.storage, self.case.work, self.case.plan
        recomputed = checkpointing.recomputed_bytes(shape, storage, work, plan.activation_checkpointing) if again else 0
        return Bytes({"recomputation": recomputed, "workspace": activations.block_workspace(shape, storage, work)})

    def _kept(self, blocks: int) -> Bytes:
        """What the first `blocks` blocks keep, and what stands as long as any of them does."""
        shape, storage, work, plan = self.case.shape, self.case.storage, self.case.work, self.case.plan
        mode = plan.activation_checkpointing
        blocks = min(blocks, storage.live_blocks(shape))
        if blocks < shape.blocks and checkpointing.kept_blocks(shape.blocks, mode) not in (0, shape.blocks):
            shape = replace(shape, blocks=blocks)
        kept = offload.device_bytes(shape, storage, work, mode, plan.activation_offload)
        if blocks < shape.blocks:
            kept = min(kept, -(-kept * blocks // (min(shape.blocks, 3) if plan.activation_offload else shape.blocks)))
        return Bytes({"boundaries" if mode is True else "activations": kept}) + self.around()

    def _grown(self, grown: int) -> Bytes:
        """Gradients: with several micro-batches all stand from the second on, with one they grow as activations go.

        Updated in backward, each is gone with the layer that it is of, whose workspace counts it.
        """
        if self.case.plan.optimizer_in_backward:
            return Bytes({"gradients": 0})
        return Bytes({"gradients": self.gradients if self.several else grown})

    def _passing(self) -> Bytes:
        if self.case.plan.optimizer_placement != "host":
            return Bytes()
        return Bytes({"optimizer passing": host_optimizer.passing_bytes(self.case)})

    def around(self) -> Bytes:
        mask = activations.attention_mask(self.case.storage, self.case.work)
        return Bytes({"batch": self._batch(), "attention mask": mask})

    def _batch(self) -> int:
        # Token ids and labels, with document ids and positions where rows are packed; int64.
        return self.case.work.tokens * 8 * (4 if self.case.storage.packed else 2)

    def _forward_casts(self) -> int:
        """Autocast keeps a 16-bit copy of every trained weight until its context ends, after the loss.

        Those of blocks that keep their activations are counted among these.
        """
        shape, mode = self.case.shape, self.case.plan.activation_checkpointing
        live = self.case.storage.live_blocks(shape)
        again = live - checkpointing.kept_blocks(live, mode)
        return again * activations.cast_weights(shape, self.case.storage)


def evaluation(case: Case) -> Bytes:
    """The widest moment of a forward without gradients, with the step's micro-batch and chunks."""
    shape, storage, work = case.shape, case.storage, case.work
    loss, _ = chunked_loss.loss_moments(shape, storage, work, case.plan.loss_chunk, gradients=False)
    casts = Bytes({"weight casts": storage.live_blocks(shape) * activations.cast_weights(shape, storage)})
    blocks = Bytes({"workspace": activations.forward_workspace(shape, storage, work)})
    around = _Parts(case, 0, 0, False).around()
    return around + max(loss_of(loss) + casts, blocks, key=lambda moment: moment.total)


def loss_of(moment: chunked_loss.LossBytes) -> Bytes:
    return Bytes({"logits": moment.logits, "workspace": moment.workspace})


def staging_bytes(shape: Shape, storage: Storage) -> int:
    """The largest tensor once more, as it is read before it is cast, moved or quantised."""
    largest = max((linear.parameters for linear in shape.linears), default=0)
    return storage.frozen * (largest if storage.coded else max(largest, shape.embedding_parameters))


def torch_update_bytes(elements: int, device: str) -> int:
    """Temporaries of AdamW's update: a fused kernel needs none, a CPU two of the largest tensor (root and quotient)."""
    return 8 * elements if device == "cpu" else 0


def fixed_bytes(plan: Plan) -> Bytes:
    if plan.device == "cpu":
        return Bytes({"process": HOST_PROCESS["cpu"]})
    return Bytes({"context": CONTEXT_BYTES})


def _heap(shape: Shape, storage: Storage, work: Work) -> int:
    """What the host's heap leaves unused in a step."""
    if work.tokens * storage.compute * shape.intermediate >= HEAP_TENSOR:
        return 0
    return int(HEAP_SHARE * shape.blocks * activations.saved_by_block(shape, storage, work))


def with_products(phases: dict[str, Bytes], device: str) -> dict[str, Bytes]:
    """The phases that make matrix products have the memory that their library works in."""
    if device == "cpu":
        return phases
    work = Bytes({"products": PRODUCTS_BYTES})
    return {name: phase + work if name in ("step", "evaluate") else phase for name, phase in phases.items()}


def with_allocator(phase: Bytes, device: str) -> Bytes:
    if device == "cpu":
        return phase
    moving = phase.total - phase.causes.get("weights", 0) - phase.causes.get("optimizer", 0)
    return phase + Bytes({"allocator": int(ALLOCATOR_SHARE * moving)})
