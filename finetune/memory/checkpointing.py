"""Activation checkpointing: keep only a block's input, run the block again for its backward.

Saves nearly all of what blocks keep, for one more forward of the blocks. Between all and nothing stand two more modes:
N lets every N-th block keep its activations, and `selective` keeps attention's output, so that the recomputation
leaves attention out. Bitwise: the recomputation runs the same operations on the same input (random draws inside a block
are keyed, and the generator's state is restored besides). Always the non-reentrant kind: the other loses gradients when
a block's input needs none (case B132).

Every block that transformers lets checkpoint calls a function of ours with its own forward; so any architecture whose
layers are `GradientCheckpointingLayer`s works, whatever is inside of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from finetune.contracts import Shape
from finetune.errors import ModelError
from finetune.memory.activations import boundary, saved_by_block, unsaved_by_first
from finetune.memory.case import Case

# Also found here by levers that price themselves in operations.
from finetune.memory.operations import step_operations as step_operations
from finetune.memory.step_time import again_seconds, micro_batches, step_seconds
from finetune.memory.storage import Storage, Work

if TYPE_CHECKING:
    from torch import nn

    from finetune.memory.offload import Offload

Mode = bool | int | str
"""False, True, N (2 and more: every N-th block keeps its activations) or `selective`."""
SELECTIVE_SHARE = 0.01
"""What selective adds to a step beside the recomputation: every operation of a block passes through Python. Assumed."""
ATTENTION_OPERATIONS = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
)
"""The operations of torch.ops.aten, on GPU and CPU, whose outputs `selective` keeps."""


def kept_blocks(blocks: int, mode: Mode) -> int:
    """How many of the first `blocks` blocks keep all of their activations."""
    if mode is False:
        return blocks
    return blocks // int(mode) if _counted(mode) else 0


def _counted(mode: Mode) -> bool:
    return isinstance(mode, int) and not isinstance(mode, bool)


def attention_kept(shape: Shape, storage: Storage, work: Work) -> int:
    """Bytes of one block's attention output and of the fp32 log-sums beside it."""
    return work.tokens * shape.heads * (storage.compute * shape.head_dim + 4)


def kept_bytes(shape: Shape, storage: Storage, work: Work, mode: Mode) -> int:
    """Bytes that all blocks keep between forward and backward."""
    whole = kept_blocks(shape.blocks, mode)
    if mode is False:
        return whole * saved_by_block(shape, storage, work) - unsaved_by_first(shape, storage, work)
    each = work.tokens * boundary(shape, storage)
    if mode == "selective":
        each += attention_kept(shape, storage, work)
    return (shape.blocks - whole) * each + whole * saved_by_block(shape, storage, work)


def recomputed_bytes(shape: Shape, storage: Storage, work: Work, mode: Mode) -> int:
    """Bytes of the one block whose activations stand again during its backward; a fp32 input is the kept one itself."""
    if mode is False:
        return 0
    shared = work.tokens * boundary(shape, storage) if storage.stream == 4 else 0
    if mode == "selective":
        shared += attention_kept(shape, storage, work)
    return saved_by_block(shape, storage, work) - shared


def saves(case: Case) -> int:
    """Bytes of a step's peak that the lever takes away (negative for a model of one block)."""
    shape, storage, work, mode = case.shape, case.storage, case.work, case.plan.activation_checkpointing
    # What keeps its activations is not tiled: those are another lever's bytes.
    work = replace(work, tile=0)
    with_it = kept_bytes(shape, storage, work, mode) + recomputed_bytes(shape, storage, work, mode)
    return kept_bytes(shape, storage, work, False) - with_it


def slowdown(case: Case) -> float:
    """The share of a step's time that the lever adds."""
    mode, blocks = case.plan.activation_checkpointing, case.shape.blocks
    share = 1 - kept_blocks(blocks, mode) / blocks
    if not share:
        return 0.0
    again = micro_batches(case) * again_seconds(case, attention=mode != "selective")
    extra = SELECTIVE_SHARE if mode == "selective" else 0.0
    return share * again / step_seconds(case) + extra


def apply(module: nn.Module, mode: Mode = True, offload: Offload | None = None) -> None:
    """Sets how every block of a transformers model, bare or inside peft, keeps its activations; it may be called again.

    It works while the module is in training mode. Frozen embeddings are fine, and so is an adapter attached before or
    after. With `offload`, what blocks keep goes to host memory. Blocks that say `recomputes_itself` are told by their
    `recompute`; they have no selective mode. ModelError names an architecture that does not support it.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    model = _owner(module)
    if mode is False and offload is None and not getattr(model, "supports_gradient_checkpointing", True):
        return
    if not getattr(model, "supports_gradient_checkpointing", True):
        raise _unsupported(f"{type(model).__name__} does not support activation checkpointing")
    own: list[Any] = [part for part in module.modules() if getattr(part, "recomputes_itself", False)]
    blocks = own or [part for part in module.modules() if isinstance(part, GradientCheckpointingLayer)]
    if not blocks and (_counted(mode) or offload is not None):
        raise _unsupported(f"{type(model).__name__} lets all blocks checkpoint or none")
    whole = _way(mode is not False, mode)
    model._set_gradient_checkpointing(mode is not False, partial(_run, whole, None))
    for index, block in enumerate(blocks):
        recompute = mode is not False and not (_counted(mode) and index % int(mode) == int(mode) - 1)
        hooks = offload.place(index, len(blocks)) if offload is not None else None
        block.gradient_checkpointing = recompute or hooks is not None
        if own:
            block.recompute = recompute
        way = _plain if own else _way(recompute, mode)
        block._gradient_checkpointing_func = partial(_run, way, hooks)


def _run(way: Callable[..., Any], hooks: Callable[..., Any] | None, function: Callable[..., Any], *inputs: Any) -> Any:
    """One block's forward; transformers calls this with the block's own forward and its inputs."""
    if hooks is None:
        return way(function, *inputs)
    with hooks(function, inputs):
        return way(function, *inputs)


def _way(recompute: bool, mode: Mode) -> Callable[..., Any]:
    if not recompute:
        return _plain
    from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

    if mode != "selective":
        return partial(checkpoint, use_reentrant=False)
    contexts = partial(create_selective_checkpoint_contexts, _attention_operations())
    return partial(checkpoint, use_reentrant=False, context_fn=contexts)


def _plain(function: Callable[..., Any], *inputs: Any) -> Any:
    return function(*inputs)


def _attention_operations() -> list[Any]:
    import torch

    return [getattr(torch.ops.aten, name).default for name in ATTENTION_OPERATIONS]


def _owner(module: nn.Module) -> Any:
    """The transformers model inside (peft's wrappers only pass attributes through)."""
    for part in module.modules():
        if hasattr(type(part), "_set_gradient_checkpointing"):
            return part
    raise _unsupported(f"{type(module).__name__} is no transformers model")


def _unsupported(what: str) -> ModelError:
    return ModelError(
        what,
        where="plan.activation_checkpointing",
        remedy="plan.activation_checkpointing=false, plan.activation_offload=false",
    )
