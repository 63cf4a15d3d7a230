"""Elementwise optimizers one slice of a tensor at a time, with state tensors that are views of buffers of someone else.

What an optimizer does to a whole tensor at once it does here to a part of it, with the same operations, so the bits are the
same. This is what lets weights, gradients and state pass through a device that could never hold them together. Rows
whose update mixes elements (Adafactor's means of rows, Muon's products) cannot be cut and are refused by name.

Legend: N elements of a flat slice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from finetune.errors import InputError
from finetune.kernels.adam_values import Scalars, Slice, States
from finetune.kernels.adamw import new_states, state_views, update_
from finetune.kernels.stochastic_rounding import Draws
from finetune.optim.builders import SLICED
from finetune.optim.coded import SPLIT, STOCHASTIC, Coded


def check_sliced(optimizer: torch.optim.Optimizer, name: str) -> None:
    """InputError for an optimizer that cannot be cut."""
    if not isinstance(optimizer, Coded | torch.optim.AdamW):
        raise InputError(
            f"optimizer.name={name} updates whole tensors, and plan.weights=streamed updates them slice by slice",
            "optimizer.name, plan.weights",
            f"optimizer.name={' or '.join(SLICED)}, or plan.weights=resident",
        )


@dataclass(frozen=True)
class Hyper:
    """What one update of one tensor is made with: fixed when its gradient is complete, used whenever it is made."""

    lr: float
    step: int


class Slicing:
    """An optimizer seen tensor by tensor; what it keeps for a parameter stands in `optimizer.state` under its own names."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        self.coded = isinstance(optimizer, Coded)
        self._where = {
            parameter: (group, at) for group in optimizer.param_groups for at, parameter in enumerate(group["params"])
        }

    def layout(self, parameter: nn.Parameter) -> dict[str, tuple[int, torch.dtype]]:
        """The state tensors of a parameter: elements and type of each."""
        if not self.coded:
            return {name: (parameter.numel(), torch.float32) for name in ("exp_avg", "exp_avg_sq")}
        group = self._where[parameter][0]
        empty = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
        states = new_states(self.optimizer.rule, empty, group["form"], self.optimizer.trained == SPLIT)
        return {name: (tensor.numel(), tensor.dtype) for name, tensor in states.tensors.items()}

    def adopt(self, parameter: nn.Parameter, states: Mapping[str, Tensor]) -> None:
        """Makes these host tensors (flat) the parameter's state: filled with what it had, else zeros."""
        before = self.optimizer.state.get(parameter) or {}
        kept: dict[str, Any] = {"step": before.get("step", 0 if self.coded else torch.zeros(()))}
        for name, tensor in states.items():
            if name in before:
                tensor.copy_(before[name].view(-1))
            else:
                tensor.zero_()
            kept[name] = tensor if self.coded else tensor.view(parameter.shape)
        self.optimizer.state[parameter] = kept

    def next(self, parameter: nn.Parameter) -> Hyper:
        """The hyperparameters of the parameter's next update, which counts as made."""
        group = self._where[parameter][0]
        state = self.optimizer.state[parameter]
        state["step"] += 1
        return Hyper(float(group["lr"]), int(state["step"]))

    @torch.no_grad()
    def update(self, parameter: nn.Parameter, hyper: Hyper, part: Slice) -> None:
        """Updates a slice in place: weight and states."""
        group, at = self._where[parameter]
        if not self.coded:
            _adamw(group, hyper, part)
            return
        beta1, beta2 = group["betas"]
        scalars = Scalars(hyper.lr, beta1, beta2, group["eps"], group["weight_decay"], hyper.step)
        optimizer = self.optimizer
        draws = Draws(optimizer.seed, hyper.step, group["places"][at]) if optimizer.trained == STOCHASTIC else None
        states = States(group["form"], part.states)
        update_(optimizer.rule, part.weight, part.gradient, states, scalars, draws and draws.after(part.start))

    def cut(self, parameter: nn.Parameter, states: Mapping[str, Tensor], part: slice) -> dict[str, Tensor]:
        """The states (flat) of a slice of the tensor; it starts and, but for the last, ends at a block's edge."""
        if not self.coded:
            return {name: tensor[part] for name, tensor in states.items()}
        form = self._where[parameter][0]["form"]
        return dict(state_views(States(form, dict(states)), part).tensors)


def _adamw(group: Mapping[str, Any], hyper: Hyper, part: Slice) -> None:
    """torch's own AdamW: the plain loop on a CPU, the fused kernel on a GPU, as an optimizer built there takes."""
    from torch.optim.adamw import adamw

    fused = part.weight.is_cuda
    before = torch.full((), float(hyper.step - 1), device=part.weight.device)
    beta1, beta2 = group["betas"]
    adamw(
        [part.weight], [part.gradient], [part.states["exp_avg"]], [part.states["exp_avg_sq"]], [], [before],
        foreach=False, fused=fused, amsgrad=False, beta1=beta1, beta2=beta2, lr=hyper.lr,
        weight_decay=group["weight_decay"], eps=group["eps"], maximize=False,
    )  # fmt: skip
