"""Builders of the optimizer table: from parameter groups and the recipe's section to an optimizer. torch is imported when called."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from finetune.errors import InputError
from finetune.optim.groups import divide

if TYPE_CHECKING:
    import torch
    from torch import nn

    from finetune.config.schema import OptimizerSection

Groups = list[dict[str, Any]]

SMALLEST_CODED = 4096
"""Elements below which a tensor's state stays in fp32: coding saves nothing there, and blocks may be larger than the tensor."""
SLICED = ("adamw", "adamw8bit", "adamw4bit", "adamwfp8", "lion", "sgd")
"""Rows whose update treats each element alone, so that a tensor can be updated slice by slice (optim/slices)."""
MUON_MOMENTUM = 0.95


@dataclass(frozen=True)
class Keeping:
    """How weights are kept (`model.trained`), and the seed that keys the draws."""

    trained: str = "fp32"
    seed: int = 0


def options(section: OptimizerSection) -> dict[str, Any]:
    """AdamW's options as torch names them."""
    return {"lr": section.lr, "betas": (section.beta1, section.beta2), "eps": section.epsilon}


def is_coded(section: OptimizerSection, elements: int, role: str) -> bool:
    """Whether a tensor's state is coded where the optimizer codes any."""
    return elements >= SMALLEST_CODED and role not in section.full_state


def is_matrix(role: str, dimensions: int) -> bool:
    """Whether Muon's rule takes a tensor: matrices, but for embeddings and the head."""
    return dimensions == 2 and role not in ("embedding", "head")


def adamw(groups: Groups, section: OptimizerSection, keeping: Keeping) -> torch.optim.Optimizer:
    """torch's AdamW, fused on a GPU, over fp32 weights; ours with fp32 states over others."""
    if keeping.trained != "fp32":
        return coded("fp32", "adamw")(groups, section, keeping)
    from torch.optim import AdamW

    on_gpu = all(parameter.is_cuda for group in groups for parameter in group["params"])
    return AdamW(groups, **options(section), fused=True if on_gpu else None)


def coded(form: str, rule: str) -> Any:
    """A builder of our optimizer with states in `form`, but for tensors that keep fp32 states."""

    def make(groups: Groups, section: OptimizerSection, keeping: Keeping) -> torch.optim.Optimizer:
        from finetune.optim.coded import Coded

        parts = divide(groups, lambda count, role, _: form if is_coded(section, count, role) else "fp32", "form")
        return Coded(parts, rule, options(section), keeping.trained, keeping.seed)

    return make


def paged_adamw8bit(groups: Groups, section: OptimizerSection, keeping: Keeping) -> torch.optim.Optimizer:
    """bitsandbytes' paged AdamW. InputError where a parameter is not on a GPU: there is no paging there."""
    if not all(parameter.is_cuda for group in groups for parameter in group["params"]):
        raise InputError(
            "paged_adamw8bit pages between a GPU and the host, and there is no GPU here",
            "optimizer.name",
            "optimizer.name=adamw8bit",
        )
    from finetune.optim.paged import PagedAdamW8bit

    parts = divide(groups, lambda count, role, _: 8 if is_coded(section, count, role) else 32, "bits")
    return PagedAdamW8bit(parts, **options(section))


def adafactor(groups: Groups, section: OptimizerSection, keeping: Keeping) -> torch.optim.Optimizer:
    """torch's Adafactor; its rate is relative to a tensor's own size, at most lr, and it clips each tensor's step."""
    from torch.optim import Adafactor

    def make(parts: Groups) -> torch.optim.Optimizer:
        return Adafactor(parts, lr=section.lr)

    return _kept(groups, make, {"lr": section.lr}, keeping)


def muon(groups: Groups, section: OptimizerSection, keeping: Keeping) -> torch.optim.Optimizer:
    """torch's Muon for matrices, scaled so that AdamW's rates suit it (adjust_lr_fn), and AdamW for the rest."""
    from torch.optim import Muon

    def make(parts: Groups) -> torch.optim.Optimizer:
        return Muon(parts, lr=section.lr, momentum=MUON_MOMENTUM, adjust_lr_fn="match_rms_adamw")

    def kind(count: int, role: str, parameter: nn.Parameter) -> bool:
        return is_matrix(role, parameter.dim())

    parts = divide(groups, kind, "matrices")
    matrices = [group for group in parts if group["matrices"]]
    rest = [group for group in parts if not group["matrices"]]
    if not matrices:
        raise InputError(
            "muon updates matrices, and no trained parameter is one",
            "optimizer.name",
            "optimizer.name=adamw",
        )
    made = [_kept(matrices, make, {"lr": section.lr}, keeping)]
    if rest:
        made.append(adamw(rest, section, keeping))
    from finetune.optim.coded import Joined

    return Joined(made)


def _kept(groups: Groups, make: Any, defaults: dict[str, Any], keeping: Keeping) -> torch.optim.Optimizer:
    """What `make` builds over fp32 weights; over others its steps on stand-ins."""
    if keeping.trained == "fp32":
        made: torch.optim.Optimizer = make(groups)
        return made
    from finetune.optim.coded import Rounded

    return Rounded(groups, make, defaults, keeping.trained, keeping.seed)
