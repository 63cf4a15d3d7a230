"""The optimizer table: how each is built and the bytes of state that it keeps for a tensor.

The planner reads the bytes, the run builds from the same row, and a test holds the bytes to what was measured. The
file imports no torch: builders do, when called.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from finetune.errors import FinetuneError, InputError
from finetune.optim.groups import parameter_groups, role_by_name

if TYPE_CHECKING:
    import torch
    from torch import nn

    from finetune.config.schema import OptimizerSection

SMALLEST_8BIT = 4096
"""Elements below which a tensor's state stays in 32 bits: the quantiser's blocks are not worth it there."""
BLOCK_8BIT = 256
"""Elements that share one scale in an 8-bit state (bitsandbytes' block size)."""


@dataclass(frozen=True)
class OptimizerRow:
    """One optimizer. `state_bytes(elements, role)` are the bytes of state of one tensor; `shared_bytes` come once a run.

    `exact` is false where the state is an approximation, which only a person may choose (the planner never does).
    `full_roles` are the roles (optim/groups) whose state stays in 32 bits.
    """

    name: str
    build: Callable[[list[dict[str, Any]], OptimizerSection], torch.optim.Optimizer]
    state_bytes: Callable[..., int]
    exact: bool
    note: str
    shared_bytes: int = 0
    full_roles: tuple[str, ...] = ()


def _options(section: OptimizerSection) -> dict[str, Any]:
    return {"lr": section.lr, "betas": (section.beta1, section.beta2), "eps": section.epsilon}


def _adamw(groups: list[dict[str, Any]], section: OptimizerSection) -> torch.optim.Optimizer:
    from torch.optim import AdamW

    on_gpu = all(parameter.is_cuda for group in groups for parameter in group["params"])
    return AdamW(groups, **_options(section), fused=True if on_gpu else None)


def _adamw_bytes(elements: int, role: str = "") -> int:
    # Two fp32 moments, and the step counter: a fp32 scalar that torch keeps for each tensor.
    return 8 * elements + 4


def _adamw8bit(groups: list[dict[str, Any]], section: OptimizerSection) -> torch.optim.Optimizer:
    from finetune.optim.adamw8bit import AdamW8bit, split_by_bits

    return AdamW8bit(split_by_bits(groups, OPTIMIZERS["adamw8bit"].full_roles), **_options(section))


def _adamw8bit_bytes(elements: int, role: str = "") -> int:
    if elements < SMALLEST_8BIT or role in OPTIMIZERS["adamw8bit"].full_roles:
        return 8 * elements
    # Two 8-bit moments, each with a fp32 scale for every block.
    return 2 * elements + 2 * 4 * -(-elements // BLOCK_8BIT)


OPTIMIZERS: dict[str, OptimizerRow] = {
    "adamw": OptimizerRow("adamw", _adamw, _adamw_bytes, True, "AdamW, both moments in fp32"),
    "adamw8bit": OptimizerRow(
        "adamw8bit",
        _adamw8bit,
        _adamw8bit_bytes,
        False,
        "AdamW with moments in 8 bits (bitsandbytes); embeddings, head and tensors under 4096 elements keep 32 bits",
        # Two tables of 256 fp32 values say what the 8-bit codes mean.
        shared_bytes=2 * 256 * 4,
        full_roles=("embedding", "head"),
    ),
}


def row_of(name: str) -> OptimizerRow:
    """The row of that name; InputError lists the names there are."""
    row = OPTIMIZERS.get(name)
    if row is None:
        raise InputError(f"unknown optimizer '{name}'", "optimizer.name", f"one of {', '.join(OPTIMIZERS)}")
    return row


def state_bytes(name: str, elements: Mapping[str, int], roles: Mapping[str, str] | None = None) -> int:
    """Bytes of state of optimizer `name` for tensors of these names and element counts, all together.

    Roles come from `roles` (optim/groups), else from the names. The sum of the tensors' own bytes; an allocator may
    round each up. Equal to what is measured after the first step (tested).
    """
    row = row_of(name)
    role = {tensor: (roles or {}).get(tensor, role_by_name(tensor)) for tensor in elements}
    total = sum(row.state_bytes(count, role[tensor]) for tensor, count in elements.items())
    approximated = any(row.state_bytes(count, role[tensor]) < 8 * count for tensor, count in elements.items())
    return total + (row.shared_bytes if approximated else 0)


def full_precision_names(name: str, elements: Mapping[str, int], roles: Mapping[str, str] | None = None) -> list[str]:
    """Names of tensors whose state stays in 32 bits, to be shown for an optimizer that approximates; all for an exact one."""
    row = row_of(name)
    role = {tensor: (roles or {}).get(tensor, role_by_name(tensor)) for tensor in elements}
    return [tensor for tensor, count in elements.items() if row.state_bytes(count, role[tensor]) >= 8 * count]


def build(
    section: OptimizerSection, named: Mapping[str, nn.Parameter], roles: Mapping[str, str] | None = None
) -> torch.optim.Optimizer:
    """The optimizer of a recipe over trained parameters by name (`Model.trainable()`), with decay groups made.

    Every parameter must be fp32: moments and updates take the parameter's own type, and updates smaller than a 16-bit
    weight can show would be lost. The groups' `lr` is the section's; the loop sets it at each step from `schedule.rate`.
    """
    if not named:
        raise InputError(
            "nothing to train: no parameter requires a gradient", "adapter", "check adapter.kind and targets"
        )
    other = [
        f"{name} ({parameter.dtype})" for name, parameter in named.items() if str(parameter.dtype) != "torch.float32"
    ]
    if other:
        shown = ", ".join(other[:3])
        raise FinetuneError(f"{len(other)} trained parameters are not fp32: {shown}", "optimizer", "cast them first")
    return row_of(section.name).build(parameter_groups(named, section.weight_decay, roles), section)
