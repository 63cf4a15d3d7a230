"""Updates of one tensor: AdamW with coded states, Lion, and SGD with momentum; weights in fp32, bf16, or bf16 and a rest.

`update_` decodes the states, takes a step in fp32, encodes the states and rounds the weight. The plain form goes through
the tensor in slices, so its temporaries are small whatever the tensor; on a GPU one Triton kernel (fused/adamw) does an
AdamW step in one pass. It knows nothing of optimizer objects: parameter, gradient and states may be views of flat buffers.

Every operation stands alone (no fused multiply-add), in the order that the kernel has too, so that both agree bit for bit
where square roots and divisions are rounded as IEEE 754 says.

Source: decoupled weight decay, Loshchilov and Hutter 2017 (arXiv 1711.05101); Lion, Chen et al. 2023 (arXiv 2302.06675).
Legend: N elements of a flat slice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from finetune.errors import FinetuneError
from finetune.kernels.adam_values import CORRECTION, Scalars, States
from finetune.kernels.state_codes import FORMATS, StateFormat, decode, encode, root
from finetune.kernels.stochastic_rounding import Draws, join, round_stochastically, split

SLICE_ELEMENTS = {"cpu": 2**18, "cuda": 2**23}
"""Elements updated at once by the plain form: some ten fp32 temporaries of that size. A multiple of every block."""


def adamw_rule(weight_N: Tensor, gradient_N: Tensor, states: Mapping[str, Tensor], scalars: Scalars) -> None:
    """AdamW on fp32 tensors, in place."""
    decay, take1, beta2, take2, spread, epsilon, size = scalars.numbers()
    mean_N, square_N = states["mean"], states["square"]
    mean_N.add_((gradient_N - mean_N).mul_(take1))
    square_N.mul_(beta2).add_((gradient_N * gradient_N).mul_(take2))
    weight_N.mul_(decay).sub_(mean_N.div(root(square_N).mul_(spread).add_(epsilon)).mul_(size))


def lion_rule(weight_N: Tensor, gradient_N: Tensor, states: Mapping[str, Tensor], scalars: Scalars) -> None:
    """Lion on fp32 tensors, in place: a step of lr in the direction of the sign of a mean."""
    mean_N = states["mean"]
    direction_N = (mean_N * scalars.beta1).add_(gradient_N * (1.0 - scalars.beta1)).sign_()
    weight_N.mul_(1.0 - scalars.lr * scalars.weight_decay).sub_(direction_N.mul_(scalars.lr))
    mean_N.mul_(scalars.beta2).add_(gradient_N * (1.0 - scalars.beta2))


def sgd_rule(weight_N: Tensor, gradient_N: Tensor, states: Mapping[str, Tensor], scalars: Scalars) -> None:
    """SGD with momentum (the sum of gradients, decayed) and decoupled weight decay, on fp32 tensors, in place."""
    mean_N = states["mean"]
    mean_N.mul_(scalars.beta1).add_(gradient_N)
    weight_N.mul_(1.0 - scalars.lr * scalars.weight_decay).sub_(mean_N * scalars.lr)


@dataclass(frozen=True)
class Rule:
    """An update rule and its states, by name."""

    name: str
    apply: Callable[[Tensor, Tensor, Mapping[str, Tensor], Scalars], None] = field(repr=False)
    states: tuple[str, ...]


RULES: dict[str, Rule] = {
    "adamw": Rule("adamw", adamw_rule, ("mean", "square")),
    "lion": Rule("lion", lion_rule, ("mean",)),
    "sgd": Rule("sgd", sgd_rule, ("mean",)),
}


def new_states(rule: Rule, parameter: Tensor, form: str, keep_rest: bool = False) -> States:
    """States of a tensor before its first step, all zeros, on its device. `keep_rest` adds a bf16 weight's correction."""
    kind, elements, device = FORMATS[form], parameter.numel(), parameter.device
    tensors: dict[str, Tensor] = {}
    for name in rule.states:
        if kind.block:
            tensors[name] = torch.zeros(kind.code_bytes(elements), dtype=torch.uint8, device=device)
            tensors[f"{name}_scales"] = torch.zeros(kind.scale_count(elements), device=device)
        else:
            tensors[name] = torch.zeros(elements, device=device)
    if keep_rest:
        tensors[CORRECTION] = torch.zeros(elements, dtype=torch.int16, device=device)
    return States(form, tensors)


@torch.no_grad()
def update_(
    rule: Rule, parameter: Tensor, gradient: Tensor, states: States, scalars: Scalars, draws: Draws | None = None
) -> None:
    """One step of one tensor, in place: parameter (fp32 or bf16, contiguous) and states.

    A bf16 parameter is rounded by its correction where the states have one, else stochastically where `draws` name the
    draws, else to the nearest. The gradient is fp32 or bf16 and is not changed.
    """
    if not parameter.is_contiguous():
        raise FinetuneError(f"a trained tensor of shape {list(parameter.shape)} is not contiguous", "optimizer")
    weight_N, gradient_N = parameter.detach().view(-1), gradient.detach().contiguous().view(-1)
    if rule.name == "adamw" and parameter.is_cuda:
        from finetune.kernels.fused.adamw import launch

        launch(weight_N, gradient_N, states, scalars, draws)
        return
    together = SLICE_ELEMENTS.get(parameter.device.type, 2**20)
    for start in range(0, weight_N.numel(), together):
        part = slice(start, min(start + together, weight_N.numel()))
        views = state_views(states, part)
        here = draws.after(start) if draws is not None else None
        update_slice_(rule, weight_N[part], gradient_N[part], views, scalars, here)


def update_slice_(
    rule: Rule, weight_N: Tensor, gradient_N: Tensor, states: States, scalars: Scalars, draws: Draws | None = None
) -> None:
    """As `update_`, by plain operations, all of the slice at once."""
    kind, tensors = FORMATS[states.form], states.tensors
    values = {name: _decoded(tensors, name, weight_N.numel(), kind) for name in rule.states}
    wide_N = join(weight_N, tensors[CORRECTION]) if CORRECTION in tensors else weight_N.float()
    rule.apply(wide_N, gradient_N.float(), values, scalars)
    for name in rule.states if kind.block else ():
        codes, scales = encode(values[name], kind, square=name == "square")
        tensors[name].copy_(codes)
        tensors[f"{name}_scales"].copy_(scales)
    if weight_N.dtype == torch.float32:
        return
    if CORRECTION in tensors:
        narrow_N, rest_N = split(wide_N)
        tensors[CORRECTION].copy_(rest_N)
        weight_N.copy_(narrow_N)
    else:
        weight_N.copy_(wide_N if draws is None else round_stochastically(wide_N, draws))


def _decoded(tensors: Mapping[str, Tensor], name: str, elements: int, kind: StateFormat) -> Tensor:
    if not kind.block:
        return tensors[name]
    return decode(tensors[name], tensors[f"{name}_scales"], elements, kind, square=name == "square")


def state_views(states: States, part: slice) -> States:
    """The states of a slice that begins and (but for the last) ends at a block's edge."""
    kind = FORMATS[states.form]
    views: dict[str, Tensor] = {}
    for name, tensor in states.tensors.items():
        if name == CORRECTION or not kind.block:
            views[name] = tensor[part]
        elif name.endswith("_scales"):
            views[name] = tensor[part.start // kind.block : -(-part.stop // kind.block)]
        else:
            views[name] = tensor[part.start * kind.bits // 8 : kind.code_bytes(part.stop)]
    return States(states.form, views)
