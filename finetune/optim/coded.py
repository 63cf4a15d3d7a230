"""Optimizers of this toolkit over kernels/adamw: AdamW with states in a format, Lion, SGD; and a shell for other libraries'.

Both hold weights in fp32 or, as `model.trained` says, in bf16 that is rounded stochastically, split or to the nearest. A group
holds what `optim/groups` puts there: `names`, `roles`, and `places`, the tensors' numbers in model order, which key the draws.
The step count is a plain number in each tensor's state, so it is saved and resumed with it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from finetune.kernels.adam_values import CORRECTION, Scalars, States
from finetune.kernels.adamw import RULES, SLICE_ELEMENTS, new_states, update_
from finetune.kernels.stochastic_rounding import Draws, join, round_stochastically, split
from finetune.optim.groups import PER_TENSOR

FP32, STOCHASTIC, SPLIT, NEAREST = "fp32", "stochastic", "split", "bf16"
"""Values of `model.trained`."""


class Coded(torch.optim.Optimizer):
    """One of kernels/adamw's RULES. A group's `form` names the format of its tensors' states."""

    def __init__(
        self, groups: list[dict[str, Any]], rule: str, options: dict[str, Any], trained: str, seed: int
    ) -> None:
        super().__init__(groups, {"form": "fp32", **options})
        self.rule = RULES[rule]
        self.trained = trained
        self.seed = seed

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Updates every parameter that has a gradient."""
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for place, parameter in zip(group["places"], group["params"], strict=True):
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["step"] = 0
                    state.update(new_states(self.rule, parameter, group["form"], self.trained == SPLIT).tensors)
                state["step"] += 1
                scalars = Scalars(
                    group["lr"], beta1, beta2, group["eps"], group["weight_decay"], state["step"]
                )  # fmt: skip
                draws = Draws(self.seed, state["step"], place) if self.trained == STOCHASTIC else None
                tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
                update_(self.rule, parameter, parameter.grad, States(group["form"], tensors), scalars, draws)


class Rounded(torch.optim.Optimizer):
    """Another library's fp32 optimizer over bf16 weights: tensor by tensor, an fp32 stand-in is stepped and rounded back.

    `make(groups)` builds the optimizer of one tensor. Its state is this one's, under the real parameter; the stand-in holds
    memory only while its tensor is updated.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        make: Callable[[list[dict[str, Any]]], torch.optim.Optimizer],
        options: dict[str, Any],
        trained: str,
        seed: int,
    ) -> None:
        super().__init__(groups, options)
        self.trained = trained
        self.seed = seed
        self.inner: list[list[tuple[nn.Parameter, torch.optim.Optimizer]]] = []
        for group in self.param_groups:
            made = []
            for parameter in group["params"]:
                stand_in = nn.Parameter(torch.zeros(parameter.shape, device=parameter.device))
                own = {key: [value] for key, value in (("params", stand_in), ("names", ""), ("roles", ""))}
                one = {**{key: value for key, value in group.items() if key not in PER_TENSOR}, **own}
                made.append((stand_in, make([one])))
                stand_in.data = torch.empty(0, device=parameter.device)
            self.inner.append(made)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Updates every parameter that has a gradient."""
        for group, made in zip(self.param_groups, self.inner, strict=True):
            for place, parameter, (stand_in, inner) in zip(group["places"], group["params"], made, strict=True):
                if parameter.grad is not None:
                    inner.param_groups[0]["lr"] = group["lr"]
                    self._step_one(parameter, stand_in, inner, place)

    def _step_one(
        self, parameter: nn.Parameter, stand_in: nn.Parameter, inner: torch.optim.Optimizer, place: int
    ) -> None:
        state = self.state[parameter]
        step = state.get("updates", 0) + 1
        rest = state.get(CORRECTION)
        if self.trained == SPLIT and rest is None:
            rest = torch.zeros(parameter.numel(), dtype=torch.int16, device=parameter.device)
        flat = parameter.detach().view(-1)
        stand_in.data = (flat.float() if rest is None else join(flat, rest)).view(parameter.shape)
        assert parameter.grad is not None
        stand_in.grad = parameter.grad.float()
        kept = {key: value for key, value in state.items() if key not in (CORRECTION, "updates")}
        if kept:
            inner.state[stand_in] = kept
        inner.step()
        state.update(inner.state[stand_in], updates=step)
        if rest is not None:
            state[CORRECTION] = rest
        draws = Draws(self.seed, step, place) if self.trained == STOCHASTIC else None
        _round_back(stand_in.detach().reshape(-1), flat, rest, draws)
        stand_in.data, stand_in.grad = torch.empty(0, device=parameter.device), None


def _round_back(wide_N: Tensor, weight_N: Tensor, rest_N: Tensor | None, draws: Draws | None) -> None:
    """Writes fp32 values into a bf16 weight, slice by slice: with their rest, by draws, or to the nearest."""
    together = SLICE_ELEMENTS.get(wide_N.device.type, 2**20)
    for start in range(0, wide_N.numel(), together):
        part = slice(start, min(start + together, wide_N.numel()))
        if rest_N is not None:
            narrow_N, rest = split(wide_N[part])
            rest_N[part].copy_(rest)
        elif draws is not None:
            narrow_N = round_stochastically(wide_N[part], draws.after(start))
        else:
            narrow_N = wide_N[part]
        weight_N[part].copy_(narrow_N)


class Joined(torch.optim.Optimizer):
    """Several optimizers as one: their groups in order, one state. For rows that treat matrices and the rest differently."""

    def __init__(self, parts: list[torch.optim.Optimizer]) -> None:
        super().__init__([{**group} for part in parts for group in part.param_groups], {})
        self.parts = parts
        # The parts' own groups and one shared state: what is set here, or restored, is what they see.
        self.param_groups = [group for part in parts for group in part.param_groups]
        for part in parts:
            part.state = self.state

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """A step of every part."""
        for part in self.parts:
            part.step()
