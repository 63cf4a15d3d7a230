"""The one order in which a loaded model is made ready: keyed draws, fast blocks, levers. Nothing later undoes something
earlier."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from finetune.contracts import Model, Plan
from finetune.kernels.keyed_dropout import DrawKey, key_dropouts
from finetune.kernels.precision import DTYPES
from finetune.memory import checkpointing
from finetune.memory.host_embedding import place_on_host
from finetune.memory.host_optimizer import HostStates, step_only
from finetune.memory.host_rows import GivenIds
from finetune.memory.offload import Offload
from finetune.memory.step_in_backward import StepInBackward
from finetune.models.fast import backbone

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn


@dataclass(frozen=True)
class Assembled:
    """What the loop sets around each micro-batch: the key of keyed draws, and the ids for an embedding on the host."""

    key: DrawKey
    given: GivenIds | None = None
    offload: Offload | None = None


def assemble(model: Model, plan: Plan, seed: int, device: torch.device, precision: str) -> Assembled:
    """Makes `model` ready to train under `plan` on `device`."""
    key = DrawKey(seed)
    key_dropouts(model.module, key)
    given = place_on_host(model.base, device) if plan.embedding_placement == "host" else None
    if plan.fast_block:
        model.fast = backbone.install(model, plan.attention, DTYPES[precision])
    offload = Offload(model.module, device) if plan.activation_offload else None
    if plan.activation_checkpointing is not False or offload is not None:
        checkpointing.apply(model.module, plan.activation_checkpointing, offload)
    return Assembled(key, given, offload)


class Update:
    """How a step's gradients become an update under a plan: the optimizer's own step, through the host, or in backward."""

    def __init__(self, model: Model, optimizer: Optimizer, plan: Plan, device: torch.device) -> None:
        self.optimizer = optimizer
        self.host = HostStates(optimizer, device) if plan.optimizer_placement == "host" else None
        self.in_backward = StepInBackward(model.trainable(), self._some) if plan.optimizer_in_backward else None

    def _some(self, parameters: Sequence[nn.Parameter]) -> None:
        if self.host is not None:
            self.host.update(parameters)
        else:
            step_only(self.optimizer, parameters)

    def step(self) -> None:
        """Updates every parameter from its gradient, and drops the gradients."""
        if self.host is not None:
            self.host.step()
        else:
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def settle(self) -> None:
        """After a resume: brings restored state to where it lives."""
        if self.host is not None:
            self.host.settle()

    def wait(self) -> None:
        """Before state is read: what is on its way to the host arrives."""
        if self.host is not None:
            self.host.wait()

    @property
    def keeps(self) -> Any:
        """Which state tensors of a parameter are restored to the host; None: as the optimizer wants."""
        from finetune.memory.host_optimizer import belongs_on_host

        return belongs_on_host if self.host is not None else None
