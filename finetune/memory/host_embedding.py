"""A frozen embedding in host memory: only the rows of a batch's tokens are sent to the device.

A vocabulary of 128k is 1 GiB in bf16, of which a batch of 8,192 tokens reads at most 64 MiB. The rows are gathered on the
host and copied, so the bits are the same. Only for an embedding that nothing trains and that the head does not share:
a shared matrix is needed on the device for the logits anyway.

Legend: B rows, S positions, D hidden width, V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from finetune.contracts import Shape
from finetune.errors import ModelError
from finetune.memory.case import Case, link_seconds
from finetune.memory.step_time import micro_batches, step_seconds
from finetune.memory.storage import Storage, Work

if TYPE_CHECKING:
    import torch
    from torch import nn

    from finetune.memory.host_rows import GivenIds

GATHER = 2.0
"""How much slower than the link the host gathers loose rows, one thread and pageable memory. Assumed."""


def refusal(shape: Shape, storage: Storage) -> str:
    """Why the embedding has to be on the device; empty where it has not."""
    if storage.trained:
        return "is for a frozen embedding, and adapter.kind=none trains it"
    if storage.embedding_adapted:
        return "is for a frozen embedding, and adapter.targets reaches it"
    if storage.part is not None and any(role == "embedding" for _, role in storage.part.tensors):
        return "is for a frozen embedding, and model.new_tokens or adapter.modules_to_save train rows of it"
    if shape.tied:
        return f"is for an embedding of its own, and {shape.name} shares its matrix with the head"
    return ""


def weight_bytes(shape: Shape, storage: Storage) -> int:
    """Bytes of the embedding as it is stored."""
    return storage.frozen * shape.embedding_parameters


def staging_bytes(shape: Shape, storage: Storage, work: Work) -> int:
    """Host bytes of the rows on their way: two buffers of one micro-batch."""
    return 2 * work.tokens * shape.hidden * storage.frozen


def saves(case: Case) -> int:
    """Bytes of the device that the lever frees."""
    return weight_bytes(case.shape, case.storage) if case.plan.embedding_placement == "host" else 0


def slowdown(case: Case) -> float:
    """The share of a step's time that the lever adds: gathering and sending come before the first block."""
    if case.plan.embedding_placement != "host":
        return 0.0
    moved = case.work.tokens * case.shape.hidden * case.storage.frozen
    return GATHER * link_seconds(case, moved) * micro_batches(case) / step_seconds(case)


def place_on_host(base: nn.Module, device: torch.device) -> GivenIds:
    """Swaps the input embedding of a transformers model for one whose rows are on the host.

    ModelError for one that is trained, adapted, shared with the head, or does more than look rows up.
    """
    from torch import nn as torch_nn

    model: Any = base
    embedding = model.get_input_embeddings()
    head = model.get_output_embeddings()
    why = ""
    if type(embedding) is not torch_nn.Embedding or embedding.max_norm is not None:
        why = f"{type(embedding).__name__} does more than look rows up"
    elif embedding.weight.requires_grad:
        why = "it is trained"
    elif head is not None and head.weight is embedding.weight:
        why = "the head shares its matrix"
    if why:
        raise ModelError(
            f"the embedding cannot be kept on the host: {why}",
            "plan.embedding_placement",
            "plan.embedding_placement=device",
        )
    from finetune.memory.host_rows import GivenIds, HostRows

    given = GivenIds()
    model.set_input_embeddings(HostRows(embedding.weight.detach(), device, given))
    return given
