"""Optimizer step in backward: each parameter is updated as soon as its gradient is complete, which is then freed.

At most one gradient stands at a time, where all of them are as large as the fp32 weights. The update is the optimizer's
own, parameter by parameter, so the bits are the same; but nothing that needs all gradients first can happen: no clipping
of the global norm, no sum over processes or micro-batches, no skipped step, and no look at the norm before the update. The
loss is looked at before the backward; a gradient that is not finite is noticed when its update is done, and that step is
not undone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from finetune.config.schema import Recipe
from finetune.memory.case import Case
from finetune.memory.step_time import step_seconds

if TYPE_CHECKING:
    from torch import Tensor, nn

LAUNCH_SECONDS = 4e-5
"""What an update of its own costs to launch, a parameter: one call of an optimizer from Python. Assumed."""
LOSS_WAIT = 0.01
"""The share of a step that is lost by waiting for the loss before the backward. Assumed."""


def refusal(recipe: Recipe, precision: str, ranks: int) -> str:
    """Why the lever cannot be exact for this recipe; empty where it can."""
    if recipe.train.max_grad_norm is not None:
        return f"updates before the gradient's norm is known, and train.max_grad_norm={recipe.train.max_grad_norm:g} clips it"
    if precision == "fp16":
        return "updates before an overflow is known, and model.precision=fp16 skips such steps"
    if ranks > 1:
        return f"updates before the gradients of {ranks} processes are summed"
    if recipe.train.batch is None:
        return "needs one micro-batch a step, and steps of train.batch_tokens have as many rows as fit"
    return ""


def gradient_bytes(case: Case) -> int:
    """Bytes of gradients that stand at once: the largest tensor's with the lever, else all."""
    return case.storage.weight * case.largest if case.plan.optimizer_in_backward else case.gradients


def saves(case: Case) -> int:
    """Bytes of gradients that never stand together."""
    return case.gradients - gradient_bytes(case)


def slowdown(case: Case) -> float:
    """The share of a step's time that the lever adds: many small updates instead of one, and the wait for the loss."""
    if not case.plan.optimizer_in_backward:
        return 0.0
    return LAUNCH_SECONDS * sum(each.count for each in case.tensors) / step_seconds(case) + LOSS_WAIT


class StepInBackward:
    """Updates in backward, for parameters in the order of `named`. `update` steps the given parameters by their `.grad`.

    `mode` is what happens to a complete gradient: `update` within a step, `drop` in a trial, else it stays (`gather`).
    """

    def __init__(self, named: Mapping[str, nn.Parameter], update: Callable[[Sequence[nn.Parameter]], None]) -> None:
        self.named = named
        self.mode: Literal["gather", "update", "drop"] = "gather"
        self._update = update
        self._norms: dict[nn.Parameter, Tensor] = {}
        self._handles = [p.register_post_accumulate_grad_hook(self._complete) for p in named.values()]

    def finish(self) -> list[Tensor]:
        """After the backward: updates parameters that no row reached, with gradients of zero; the norms in model order. They
        are kept until `forget`."""
        import torch

        for parameter in self.named.values():
            if parameter not in self._norms:
                parameter.grad = torch.zeros_like(parameter)
                self._complete(parameter)
        self.mode = "gather"
        return [self._norms[parameter] for parameter in self.named.values()]

    @property
    def begun(self) -> bool:
        """Whether a step that is not finished has updated parameters."""
        return bool(self._norms)

    def forget(self) -> None:
        """After a step that is over, or broke off."""
        self._norms.clear()
        self.mode = "gather"

    def remove(self) -> None:
        """Takes the hooks away."""
        for handle in self._handles:
            handle.remove()

    def _complete(self, parameter: Any) -> None:
        import torch

        if self.mode == "gather" or parameter.grad is None:
            return
        if self.mode == "update":
            (self._norms[parameter],) = torch._foreach_norm([parameter.grad.float()])
            self._update([parameter])
        parameter.grad = None
