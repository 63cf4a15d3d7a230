"""The optimizer table: how each is built and the bytes of state that it keeps for a tensor.

The planner reads the bytes, the run builds from the same row, and a test holds the bytes to what was measured. The
file imports no torch: builders do, when called.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from finetune.errors import FinetuneError, InputError
from finetune.optim import builders
from finetune.optim.builders import Keeping, is_coded, is_matrix
from finetune.optim.groups import parameter_groups, role_by_name

if TYPE_CHECKING:
    import torch
    from torch import nn

    from finetune.config.schema import OptimizerSection

BLOCK_8BIT = 256
"""Elements that share one scale in an 8-bit or fp8 state, ours and bitsandbytes' alike."""
BLOCK_4BIT = 64
"""The same in a 4-bit state."""
SLICE_BYTES, CODING_BYTES = 28, 40
"""Bytes of temporaries an element of a slice (kernels/adamw), at their widest: drawing and rounding; coding a state. Counted."""
CPU_SLICE, GPU_SLICE = 2**18, 2**23
"""Elements of a slice."""
SHOWN = 6
"""Names that a notice lists."""


@dataclass(frozen=True)
class TensorFacts:
    """What a row needs to know of one tensor. `shape` may be unknown (None); `coded`: its state may be in fewer bits;
    `trained`: how weights are kept (`model.trained`)."""

    elements: int
    role: str = ""
    shape: tuple[int, ...] | None = None
    coded: bool = False
    trained: str = "fp32"


@dataclass(frozen=True)
class OptimizerRow:
    """One optimizer. `state_bytes(facts)` are the bytes of state of one tensor; `shared_bytes` come once a run.

    `exact` is false where the state is an approximation, which only a person may choose (the planner never does). `keys` are
    the keys of the recipe's section that it uses, of those that not all do. `workspace(elements, device, narrow)` are the
    temporaries of the largest tensor's update; `narrow`: over 16-bit weights. `fp32_only`: it trains no 16-bit weights.
    """

    name: str
    build: Callable[[list[dict[str, Any]], OptimizerSection, Keeping], torch.optim.Optimizer]
    state_bytes: Callable[[TensorFacts], int]
    exact: bool
    note: str
    keys: tuple[str, ...]
    workspace: Callable[[int, str, bool], int]
    shared_bytes: int = 0
    fp32_only: bool = False


def _adamw_bytes(facts: TensorFacts) -> int:
    # Two fp32 moments; torch's also keeps a fp32 step counter for each tensor.
    return 8 * facts.elements + (4 if facts.trained == "fp32" else 0)


def _coded_bytes(bits: int, block: int) -> Callable[[TensorFacts], int]:
    def count(facts: TensorFacts) -> int:
        if not facts.coded:
            return 8 * facts.elements
        # Two states, each with a fp32 scale for every block.
        return 2 * (-(-facts.elements * bits // 8) + 4 * -(-facts.elements // block))

    return count


def _adafactor_bytes(facts: TensorFacts) -> int:
    """Means over rows and over columns, and a step counter. Without a shape: at most those of a matrix 64 wide."""
    if facts.shape is not None and len(facts.shape) < 2:
        return 4 * facts.elements + 4
    if facts.shape is not None:
        return 4 * (facts.elements // facts.shape[-1] + facts.elements // facts.shape[-2]) + 4
    return 4 * facts.elements + 4 if facts.role == "extra" else 4 * (facts.elements // 64 + 64) + 4


def _muon_bytes(facts: TensorFacts) -> int:
    dimensions = len(facts.shape) if facts.shape is not None else 1 if facts.role == "extra" else 2
    return 4 * facts.elements if is_matrix(facts.role, dimensions) else _adamw_bytes(facts)


def _sliced(on_gpu: bool, each: int = SLICE_BYTES) -> Callable[[int, str, bool], int]:
    """Our plain form's, slice by slice; on a GPU the kernel of AdamW has none."""

    def count(elements: int, device: str, narrow: bool) -> int:
        if device == "cpu":
            return each * min(elements, CPU_SLICE)
        return each * min(elements, GPU_SLICE) if on_gpu else 0

    return count


def _adamw_workspace(elements: int, device: str, narrow: bool) -> int:
    # torch's has none on a GPU where it is fused, and two tensors (root and quotient) on a CPU.
    if narrow:
        return _sliced(False)(elements, device, narrow)
    return 8 * elements if device == "cpu" else 0


def _whole(each: int) -> Callable[[int, str, bool], int]:
    """`each` bytes an element, and over 16-bit weights an fp32 weight and gradient to stand in, and a slice's rounding."""

    def count(elements: int, device: str, narrow: bool) -> int:
        return each * elements + (8 * elements + _sliced(True)(elements, device, narrow) if narrow else 0)

    return count


ADAM_KEYS = ("beta1", "beta2", "epsilon")
CODED_KEYS = (*ADAM_KEYS, "full_state")

_ROWS = (
    OptimizerRow("adamw", builders.adamw, _adamw_bytes, True, "AdamW, both moments in fp32", ADAM_KEYS, _adamw_workspace),
    OptimizerRow(
        "adamw8bit", builders.coded("8bit", "adamw"), _coded_bytes(8, BLOCK_8BIT), False,
        "AdamW with moments in 8 bits; tensors under 4096 elements and those of optimizer.full_state keep fp32", CODED_KEYS, _sliced(False, CODING_BYTES),
    ),
    OptimizerRow(
        "paged_adamw8bit", builders.paged_adamw8bit, _coded_bytes(8, BLOCK_8BIT), False,
        "bitsandbytes' 8-bit AdamW in memory that moves to the host when the GPU is full; needs a GPU", CODED_KEYS, lambda *_: 0,
        # Two tables of 256 fp32 values say what the 8-bit codes mean.
        shared_bytes=2 * 256 * 4, fp32_only=True,
    ),
    OptimizerRow(
        "adamw4bit", builders.coded("4bit", "adamw"), _coded_bytes(4, BLOCK_4BIT), False,
        "AdamW with moments in 4 bits, for when 8 do not fit; the same tensors keep fp32", CODED_KEYS, _sliced(False, CODING_BYTES),
    ),
    OptimizerRow(
        "adamwfp8", builders.coded("fp8", "adamw"), _coded_bytes(8, BLOCK_8BIT), False,
        "AdamW with moments in float8 e4m3 with a scale a block; the same tensors keep fp32", CODED_KEYS, _sliced(False, CODING_BYTES),
    ),
    OptimizerRow(
        "adafactor", builders.adafactor, _adafactor_bytes, True,
        "torch's Adafactor: a mean a row and a column; the rate is relative to each tensor's size", (), _whole(12),
    ),
    OptimizerRow(
        "lion", builders.coded("fp32", "lion"), lambda facts: 4 * facts.elements, True,
        "Lion: steps of lr by sign; a third to a tenth of AdamW's rate is usual", ("beta1", "beta2"), _sliced(True),
    ),
    OptimizerRow(
        "sgd", builders.coded("fp32", "sgd"), lambda facts: 4 * facts.elements, True,
        "SGD with momentum beta1 and decoupled decay", ("beta1",), _sliced(True),
    ),
    OptimizerRow(
        "muon", builders.muon, _muon_bytes, True,
        "torch's Muon for matrices, at AdamW's rates; AdamW for vectors, embeddings and the head", ADAM_KEYS, _whole(16),
    ),
)  # fmt: skip
OPTIMIZERS: dict[str, OptimizerRow] = {row.name: row for row in _ROWS}


def row_of(name: str) -> OptimizerRow:
    """The row of that name; InputError lists the names there are."""
    row = OPTIMIZERS.get(name)
    if row is None:
        raise InputError(f"unknown optimizer '{name}'", "optimizer.name", f"one of {', '.join(OPTIMIZERS)}")
    return row


def tensor_bytes(
    section: OptimizerSection, trained: str, elements: int, role: str, shape: tuple[int, ...] | None = None
) -> int:
    """Bytes of state of one tensor under a recipe's optimizer, a split weight's correction included."""
    facts = TensorFacts(elements, role, shape, is_coded(section, elements, role), trained)
    return row_of(section.name).state_bytes(facts) + (2 * elements if trained == "split" else 0)


def workspace_bytes(name: str, narrow: bool, elements: int, device: str) -> int:
    """Bytes of temporaries of the update of one tensor; `narrow`: its weights are in 16 bits."""
    return row_of(name).workspace(elements, device, narrow)


def state_bytes(
    section: OptimizerSection,
    shapes: Mapping[str, tuple[int, ...]],
    roles: Mapping[str, str] | None = None,
    trained: str = "fp32",
) -> int:
    """Bytes of state for tensors of these names and shapes, all together.

    Roles come from `roles` (optim/groups), else from the names. The sum of the tensors' own bytes; an allocator may
    round each up. Equal to what is measured after the first step (tested).
    """
    total, shared = 0, 0
    for name, shape in shapes.items():
        elements = 1
        for width in shape:
            elements *= width
        role = (roles or {}).get(name, role_by_name(name))
        total += tensor_bytes(section, trained, elements, role, tuple(shape))
        if is_coded(section, elements, role):
            shared = row_of(section.name).shared_bytes
    return total + shared


def notices(
    section: OptimizerSection, named: Mapping[str, nn.Parameter], roles: Mapping[str, str] | None = None
) -> list[str]:
    """What a user should see of the choice: large tensors whose state stays fp32 (case B129), what Muon leaves to AdamW, groups."""
    row = row_of(section.name)
    role = {name: (roles or {}).get(name, role_by_name(name)) for name in named}
    said = []
    if "full_state" in row.keys:
        kept = [name for name, p in named.items() if not is_coded(section, p.numel(), role[name])]
        said.append(f"{section.name}: {len(kept)} of {len(named)} tensors keep fp32 state: {_listed(kept, named)}")
    if section.name == "muon":
        rest = [name for name, p in named.items() if not is_matrix(role[name], p.dim())]
        said.append(f"muon: {len(rest)} of {len(named)} tensors are updated by AdamW: {_listed(rest, named)}")
    for group in parameter_groups(named, section.weight_decay, roles, section.groups) if section.groups else []:
        said.append(
            f"{len(group['names'])} tensors at {group['lr_factor']:g} of the rate, decay {group['weight_decay']:g}: "
            f"{_listed(group['names'], named)}"
        )
    return said


def _listed(names: list[str], named: Mapping[str, nn.Parameter]) -> str:
    """The largest of the names first, and how many more there are."""
    largest = sorted(names, key=lambda name: -named[name].numel())
    rest = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return (", ".join(largest[:SHOWN]) or "none") + rest


def build(
    section: OptimizerSection,
    named: Mapping[str, nn.Parameter],
    roles: Mapping[str, str] | None = None,
    trained: str = "fp32",
    seed: int = 0,
) -> torch.optim.Optimizer:
    """The optimizer of a recipe over trained parameters by name (`Model.trainable()`), with its groups made.

    Parameters must be fp32, or bf16 where `trained` (`model.trained`) says so; `seed` keys the draws of stochastic rounding. The
    groups' `lr` is the section's; the loop sets it at each step from `schedule.rate` and the group's `lr_factor`.
    """
    if not named:
        raise InputError(
            "nothing to train: no parameter requires a gradient", "adapter", "check adapter.kind and targets"
        )
    row, wanted = row_of(section.name), "torch.float32" if trained == "fp32" else "torch.bfloat16"
    other = [f"{name} ({parameter.dtype})" for name, parameter in named.items() if str(parameter.dtype) != wanted]
    if other:
        shown = ", ".join(other[:3])
        what = f"{len(other)} trained parameters are not {wanted.removeprefix('torch.')}: {shown}"
        raise FinetuneError(what, "optimizer", "cast them first")
    if trained != "fp32" and row.fp32_only:
        raise InputError(f"{row.name} trains fp32 weights only", "optimizer.name", "model.trained=fp32")
    groups = parameter_groups(named, section.weight_decay, roles, section.groups)
    return row.build(groups, section, Keeping(trained, seed))
