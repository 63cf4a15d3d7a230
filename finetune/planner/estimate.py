"""Bytes by cause for each phase of a run, from the counts of a model, a recipe and a plan.

A step's peak is the largest of a few moments, each a sum of what then exists: the loss, the final norm's backward, the
first and the last block's backward, the optimizer's update. The cost models of levers and activations (memory/) give
the parts; this file only says which of them stand at the same time. On a CPU the device's memory is the host's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from finetune.config.schema import Recipe
from finetune.contracts import Bytes, Plan, Shape
from finetune.memory import activations, checkpointing, chunked_loss
from finetune.memory.storage import Storage, Work, storage_of, trained_tensors, weight_bytes
from finetune.planner.hardware import CONTEXT_BYTES

StateBytes = Callable[[int, str], int]
"""Bytes of optimizer state of one tensor, by its elements and its role (`embedding`, `head` or another)."""

UpdateBytes = Callable[[int, str], int]
"""Bytes of temporaries of one tensor's update, by its elements and the device's type."""

HOST_PROCESS = {"cpu": 700 * 2**20, "cuda": 3 * 2**30}
"""Resident bytes of a Python process with torch, transformers and peft loaded; 560 MiB measured on a CPU."""
LOADING_TENSORS = 4
"""Tensors that may pass through host memory at once while weights are loaded and moved to a GPU."""
BESIDE_TENSORS = ("context", "allocator", "process")
"""Causes that are no tensors of the run."""
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
    """What an estimate needs beside shape, recipe and plan: `longest_row` in tokens, `precision` bf16 or fp32, `rows`
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
        return sum(count for cause, count in self.phases["step"].causes.items() if cause not in BESIDE_TENSORS)

    @property
    def peak(self) -> int:
        """The largest phase's peak on the device."""
        return max(phase.total for phase in self.phases.values())


def estimate(shape: Shape, recipe: Recipe, plan: Plan, facts: Facts) -> Estimate:
    """The bytes of one process that runs the recipe with this plan, at its widest in each phase.

    Tensor bytes are as autograd and the optimizer keep them (tested against counts); `context`, `allocator` and host
    process bytes are constants measured or assumed, named in this file.
    """
    storage = storage_of(shape, recipe, facts.precision, plan.device)
    work = Work(plan.micro_batch, facts.longest_row)
    tensors = trained_tensors(shape, storage)
    # Shorter rows than the longest make more micro-batches where a step is so many tokens.
    several = facts.rows > plan.micro_batch or recipe.train.batch_tokens is not None
    parts = _Parts(shape, storage, work, plan, sum(elements for elements, _ in tensors) * storage.weight, several)
    weights = {"weights": weight_bytes(shape, storage)}
    optimizer = {"optimizer": sum(facts.state_bytes(elements, role) for elements, role in tensors)}
    largest = max((elements for elements, _ in tensors), default=0) * 4
    run = Bytes(weights) + Bytes(optimizer)
    phases = {
        "load": Bytes(weights) + Bytes({"workspace": _staging(shape, storage)}),
        "step": run + parts.widest((facts.update_bytes or _update_bytes)(largest // 4, plan.device)),
        "evaluate": run + parts.evaluation(),
        "save": run + Bytes({"workspace": largest if plan.device == "cpu" else 0}),
    }
    fixed = _fixed(plan)
    phases = {name: _with_allocator(phase, plan.device) + fixed for name, phase in phases.items()}
    if plan.device == "cpu":
        phases["step"] += Bytes({"allocator": _heap(shape, storage, work)})
        return Estimate(phases, max(phases.values(), key=lambda phase: phase.total))
    largest_stored = max(shape.embedding_parameters, *(linear.parameters for linear in shape.linears), 1)
    staging = max(LOADING_TENSORS * largest_stored * (storage.weight if storage.trained else storage.frozen), largest)
    return Estimate(phases, Bytes({"process": HOST_PROCESS["cuda"], "staging": staging}))


@dataclass(frozen=True)
class _Parts:
    """The bytes that come and go within a step. `gradients`: those of every trained tensor; `several`: a step may
    have more than one micro-batch."""

    shape: Shape
    storage: Storage
    work: Work
    plan: Plan
    gradients: int
    several: bool

    def widest(self, update: int) -> Bytes:
        """The widest moment of a step."""
        return max(self._moments(update), key=lambda moment: moment.total)

    def _moments(self, update: int) -> list[Bytes]:
        shape, storage, work = self.shape, self.storage, self.work
        on = self.plan.activation_checkpointing
        outside = Bytes({"activations": activations.saved_outside(shape, storage, work)})
        kept = self._kept(shape.blocks)
        forward, backward = chunked_loss.loss_moments(shape, storage, work, self.plan.loss_chunk)
        block = Bytes(
            {
                "recomputation": checkpointing.recomputed_bytes(shape, storage, work, on),
                "workspace": activations.block_workspace(shape, storage, work),
            }
        )
        head = storage.weight * shape.vocabulary * shape.hidden if storage.whole_head else 0
        last = (
            0
            if not storage.trained or storage.part is not None
            else storage.weight * (shape.block_parameters + (0 if shape.tied else shape.embedding_parameters))
        )
        norm = Bytes({"workspace": activations.norm_workspace(shape, storage, work)})
        return [
            kept + outside + _loss(forward) + Bytes({"weight casts": self._forward_casts()}) + self._grown(0),
            kept + outside + _loss(backward) + self._grown(0),
            kept + outside + norm + self._grown(head),
            kept + block + self._grown(head),
            self._kept(1) + block + self._grown(self.gradients - last),
            Bytes({"gradients": self.gradients, "workspace": max(update, head)}),
        ]

    def _kept(self, blocks: int) -> Bytes:
        """What the first `blocks` blocks keep, and what stands as long as any of them does."""
        on = self.plan.activation_checkpointing
        kept = checkpointing.kept_bytes(self.shape, self.storage, self.work, on)
        blocks = min(blocks, self.storage.live_blocks(self.shape))
        if blocks < self.shape.blocks:
            kept = min(kept, -(-kept * blocks // self.shape.blocks))
        return Bytes({"boundaries" if on else "activations": kept}) + self._around()

    def _grown(self, grown: int) -> Bytes:
        """Gradients: with several micro-batches all stand from the second on, with one they grow as activations go."""
        return Bytes({"gradients": self.gradients if self.several else grown})

    def _around(self) -> Bytes:
        return Bytes({"batch": self._batch(), "attention mask": activations.attention_mask(self.storage, self.work)})

    def evaluation(self) -> Bytes:
        """The widest moment of a forward without gradients, with the step's micro-batch and chunks."""
        shape, storage, work = self.shape, self.storage, self.work
        loss, _ = chunked_loss.loss_moments(shape, storage, work, self.plan.loss_chunk, gradients=False)
        casts = Bytes({"weight casts": storage.live_blocks(shape) * activations.cast_weights(shape, storage)})
        blocks = Bytes({"workspace": activations.forward_workspace(shape, storage, work)})
        return self._around() + max(_loss(loss) + casts, blocks, key=lambda moment: moment.total)

    def _batch(self) -> int:
        # Token ids and labels, with document ids and positions where rows are packed; int64.
        return self.work.tokens * 8 * (4 if self.storage.packed else 2)

    def _forward_casts(self) -> int:
        """Autocast keeps a 16-bit copy of every trained weight until its context ends, after the loss.

        Without checkpointing the same copies are counted among what the blocks keep.
        """
        if not self.plan.activation_checkpointing:
            return 0
        return self.storage.live_blocks(self.shape) * activations.cast_weights(self.shape, self.storage)


def _loss(moment: chunked_loss.LossBytes) -> Bytes:
    return Bytes({"logits": moment.logits, "workspace": moment.workspace})


def _staging(shape: Shape, storage: Storage) -> int:
    """The largest tensor once more, as it is read before it is cast, moved or quantised."""
    largest = max((linear.parameters for linear in shape.linears), default=0)
    return storage.frozen * (largest if storage.coded else max(largest, shape.embedding_parameters))


def _update_bytes(elements: int, device: str) -> int:
    """Temporaries of AdamW's update: a fused kernel needs none, a CPU two of the largest tensor (root and quotient)."""
    return 8 * elements if device == "cpu" else 0


def _fixed(plan: Plan) -> Bytes:
    if plan.device == "cpu":
        return Bytes({"process": HOST_PROCESS["cpu"]})
    return Bytes({"context": CONTEXT_BYTES})


def _heap(shape: Shape, storage: Storage, work: Work) -> int:
    """What the host's heap leaves unused in a step."""
    if work.tokens * storage.compute * shape.intermediate >= HEAP_TENSOR:
        return 0
    return int(HEAP_SHARE * shape.blocks * activations.saved_by_block(shape, storage, work))


def _with_allocator(phase: Bytes, device: str) -> Bytes:
    if device == "cpu":
        return phase
    moving = phase.total - phase.causes.get("weights", 0) - phase.causes.get("optimizer", 0)
    return phase + Bytes({"allocator": int(ALLOCATOR_SHARE * moving)})
