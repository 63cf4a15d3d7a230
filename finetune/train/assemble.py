"""The one order in which a loaded model is made ready: keyed draws, fast blocks, levers. Nothing later undoes something
earlier."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from finetune.contracts import Model, Plan
from finetune.errors import ModelError
from finetune.kernels.keyed_dropout import DrawKey, key_dropouts
from finetune.kernels.logits_change import logits_change
from finetune.kernels.precision import DTYPES, compute
from finetune.memory import checkpointing
from finetune.memory.host_embedding import place_on_host
from finetune.memory.host_optimizer import HostStates, step_only
from finetune.memory.host_rows import GivenIds
from finetune.memory.offload import Offload
from finetune.memory.step_in_backward import StepInBackward
from finetune.memory.streaming.boundaries import Boundaries
from finetune.memory.streaming.deferred import Deferred
from finetune.memory.streaming.host_blocks import HostBlocks
from finetune.memory.streaming.tall import Tall
from finetune.memory.streaming.visit import Visit
from finetune.models.fast import backbone
from finetune.models.layerwise import Layers, check
from finetune.optim.slices import Slicing, check_sliced
from finetune.train.streamed import Ends, Streamed
from finetune.train.streamed_ends import StreamedEmbedding, StreamedHead

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from finetune.config.schema import Recipe

    Told = Callable[[int, int], None]


@dataclass(frozen=True)
class Assembled:
    """What the loop sets around each micro-batch: the key of keyed draws, and the ids for an embedding on the host."""

    key: DrawKey
    given: GivenIds | None = None
    offload: Offload | None = None


def host_blocks(
    plan: Plan, recipe: Recipe, device: torch.device, room: int | None = None, told: Told | None = None
) -> HostBlocks | None:
    """Where the blocks of a streamed plan will live; None for a resident one. They may take `room` bytes of host memory;
    `told(bytes there, bytes of all)` is called while they arrive."""
    if plan.weights != "streamed":
        return None
    places = {"embedding": plan.embedding_placement, "head": plan.head_placement}
    ends = frozenset(name for name, place in places.items() if place != "device")
    made = HostBlocks(device, recipe.adapter.kind == "none", plan.slots, plan.resident_blocks, room, told)
    made.ends = ends
    return made


def host_room(recipe: Recipe, free: int, processes: int) -> int:
    """Bytes of host memory that each of `processes` of this host may take: what is free, and what the recipe allows them all."""
    asked = recipe.plan.host_memory
    return min(free, asked if isinstance(asked, int) else free) // processes


def streamed(
    model: Model, plan: Plan, recipe: Recipe, host: HostBlocks | None, optimizer: Optimizer, precision: str
) -> Streamed | None:
    """The streamed step of an assembled model; None for a resident plan. InputError for an optimizer that it cannot cut,
    ModelError for a model whose blocks cannot be run one at a time."""
    if host is None:
        return None
    device = host.device
    if model.fast is not None:
        layers: Any = backbone.FastLayers(model, model.fast)
    else:
        layers = Layers(model, lambda: compute(device, precision, recipe.model.trained))
        with host.whole():
            check(model, layers, recipe.data.pack)
    units = [[spot.parameter for spot in flat.trained if spot.parameter is not None] for flat in host.flats]
    deferred = None
    if any(units):
        check_sliced(optimizer, recipe.optimizer.name)
        deferred = Deferred(Slicing(optimizer), units, device)
    ends = _ends(model, plan, layers, host, Slicing(optimizer), DTYPES[precision])
    host.settled()
    made = Streamed(model, layers, host, deferred, Boundaries(device, plan.activation_offload), ends)
    made.settle()
    return made


def _ends(model: Model, plan: Plan, layers: Any, host: HostBlocks, updates: Slicing, dtype: torch.dtype) -> Ends:
    """Embedding and head on the host as the plan says; a frozen embedding there is looked up on the host (HostRows)."""
    table: Any = model.base.get_input_embeddings()
    head: Any = model.head
    whole = isinstance(table, nn.Embedding)
    tied = whole and head.weight is table.weight
    made: dict[int, Tall] = {}

    def tall(parameter: nn.Parameter) -> Tall:
        if id(parameter) not in made:
            made[id(parameter)] = Tall(parameter, host.device, updates if parameter.requires_grad else None)
        return made[id(parameter)]

    embedding = None
    if model.fast is None and tied and "host" in (plan.embedding_placement, plan.head_placement):
        raise ModelError(
            f"{type(model.base).__name__} looks its embedding up in its own forward, and the head shares the matrix, so it "
            "cannot pass through the device in parts",
            "plan.embedding_placement, plan.head_placement",
            "plan.embedding_placement=device plan.head_placement=device",
        )
    if whole and (plan.embedding_placement == "host" or (tied and plan.head_placement == "host")):
        embedding = StreamedEmbedding(tall(table.weight), table.padding_idx)
    streamed_head = None
    if plan.head_placement == "host" or (tied and embedding is not None):
        if type(head) is not nn.Linear or head.bias is not None or logits_change(model.base.config) is not None:
            raise ModelError(
                f"the head of {type(model.base).__name__} is more than one matrix (adapter, bias or changed logits), so it "
                "cannot pass through the device in parts",
                "plan.head_placement",
                "plan.head_placement=device",
            )
        streamed_head = StreamedHead(layers, tall(head.weight), dtype)
    visit = None
    if plan.head_placement == "visit":
        _check_visit(model, tied)
        assert host.slots is not None
        visit = Visit(tall(head.weight), host.slots.up)
    return Ends(embedding, streamed_head, visit)


def _check_visit(model: Model, tied: bool) -> None:
    """ModelError for a head that cannot come whole and leave again as one matrix of its own."""
    reason = "is more than one matrix (an adapter or a stored form)" if type(model.head) is not nn.Linear else ""
    if tied:
        reason = "is the embedding's matrix, whose gradient is not complete when the head leaves"
    if reason:
        raise ModelError(
            f"the head of {type(model.base).__name__} {reason}, so it cannot visit the device",
            "plan.head_placement",
            "plan.head_placement=host where one matrix is embedding and head, else plan.head_placement=device",
        )


def assemble(
    model: Model, plan: Plan, seed: int, device: torch.device, precision: str, host: HostBlocks | None = None
) -> Assembled:
    """Makes `model` ready to train under `plan` on `device`."""
    key = DrawKey(seed)
    key_dropouts(model.module, key)
    lookup = plan.embedding_placement == "host" and not model.base.get_input_embeddings().weight.requires_grad
    tied = model.base.get_input_embeddings().weight is model.head.weight
    given = place_on_host(model.base, device) if lookup and not (host is not None and tied) else None
    if plan.fast_block:
        model.fast = backbone.install(model, plan.attention, DTYPES[precision], plan.mlp_tile)
    if host is not None:
        # A streamed step recomputes and offloads by itself.
        host.watch(model.blocks)
        return Assembled(key, given)
    offload = Offload(model.module, device) if plan.activation_offload else None
    if plan.activation_checkpointing is not False or offload is not None:
        checkpointing.apply(model.module, plan.activation_checkpointing, offload)
    return Assembled(key, given, offload)


class Update:
    """How a step's gradients become an update under a plan: the optimizer's own step, through the host, or in backward."""

    def __init__(
        self, model: Model, optimizer: Optimizer, plan: Plan, device: torch.device, stream: Streamed | None = None
    ) -> None:
        self.optimizer = optimizer
        self.stream = stream
        self.host = HostStates(optimizer, device) if plan.optimizer_placement == "host" else None
        self.in_backward = StepInBackward(model.trainable(), self._some) if plan.optimizer_in_backward else None
        self._moving = False

    @property
    def moved(self) -> bool:
        """Whether a step that broke off may have changed weights or state. (Updates that an earlier step promised are made
        whole or not at all, and say themselves which are left.)"""
        return self._moving or (self.in_backward is not None and self.in_backward.begun)

    def _some(self, parameters: Sequence[nn.Parameter]) -> None:
        if self.host is not None:
            self.host.update(parameters)
        else:
            step_only(self.optimizer, parameters)

    def step(self, factor: float = 1.0) -> None:
        """Updates every parameter from its gradient, and drops the gradients. Gradients that are on the host are yet to be
        multiplied by `factor`, and their update is made when their weights are fetched next."""
        self._moving = True
        if self.stream is not None:
            self.stream.promise(factor)
        if self.host is not None:
            self.host.step()
        else:
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self._moving = False

    def settle(self) -> None:
        """After a resume: brings restored state to where it lives."""
        if self.host is not None:
            self.host.settle()
        if self.stream is not None:
            self.stream.settle()

    def visiting(self) -> AbstractContextManager[None]:
        """What an evaluation runs in: updates are made, and the whole model can be run."""
        return nullcontext() if self.stream is None else self.stream.visiting()

    def wait(self) -> None:
        """Before weights or state are read: updates that were promised are made, what is on its way to the host arrives."""
        if self.stream is not None:
            self.stream.flush()
        if self.host is not None:
            self.host.wait()

    @property
    def keeps(self) -> Any:
        """Which state tensors of a parameter are restored to the host; None: as the optimizer wants."""
        from finetune.memory.host_optimizer import belongs_on_host

        return belongs_on_host if self.host is not None else None
