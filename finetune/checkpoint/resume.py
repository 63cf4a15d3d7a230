"""What a run needs to go on as if it had never stopped: parameters, optimizer state and random generators, as named tensors.

Everything is kept by parameter name, not by position, so a changed set of trained parameters is found and listed
instead of landing on the wrong tensors. No pickle: tensors go to safetensors, the rest to JSON.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from finetune.errors import CheckpointError, FinetuneError

SHOWN = 8
"""Names that a message lists of each kind."""


def restore_parameters(parameters: Mapping[str, nn.Parameter], tensors: Mapping[str, Tensor], remedy: str = "") -> None:
    """Copies saved tensors into the parameters of the same names.

    Names, shapes and types must be equal: CheckpointError lists what was added, what is missing and what differs, and
    then nothing was changed. `remedy` ends the message (the caller knows how the recipes differ).
    """
    shapes = {name: (list(tensor.shape), str(tensor.dtype)) for name, tensor in tensors.items()}
    _require_same(parameters, shapes, remedy)
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(tensors[name])


def optimizer_tensors(
    optimizer: torch.optim.Optimizer, names: Mapping[str, nn.Parameter]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The optimizer's state as tensors named `parameter/key`, and facts (JSON) for what is not a tensor.

    The tensors are the live ones, not copies. Facts hold the optimizer's class, every parameter's shape and type, and
    scalar state such as bitsandbytes' step counts. Group options (rate, decay, betas) come from the recipe, not from here.
    """
    tensors: dict[str, Tensor] = {}
    scalars: dict[str, dict[str, Any]] = {}
    for name, parameter in _trained(optimizer, names).items():
        scalars[name] = {}
        # .get: asking a defaultdict for a parameter that had no step yet would make an empty state of it.
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                tensors[f"{name}/{key}"] = value
            else:
                scalars[name][key] = value
    shapes = {name: [list(parameter.shape), str(parameter.dtype)] for name, parameter in names.items()}
    return tensors, {"optimizer": type(optimizer).__name__, "parameters": shapes, "scalars": scalars}


def restore_optimizer(
    optimizer: torch.optim.Optimizer,
    names: Mapping[str, nn.Parameter],
    tensors: Mapping[str, Tensor],
    facts: Mapping[str, Any],
    remedy: str = "",
    on_host: Callable[[nn.Parameter, Tensor], bool] | None = None,
) -> None:
    """Gives the optimizer the state that `optimizer_tensors` took; the next step is then the one that would have been.

    CheckpointError when another kind of optimizer saved it, or for other parameters or shapes; then nothing was changed.
    The saved tensors are copied. Those that `on_host` names stay on the host.
    """
    kind = type(optimizer).__name__
    if facts["optimizer"] != kind:
        what = f"the checkpoint holds the state of {facts['optimizer']}, this run uses {kind}"
        raise CheckpointError(what, "optimizer.name", remedy or "use the optimizer that the run was started with")
    _require_same(names, {name: (shape, kind) for name, (shape, kind) in facts["parameters"].items()}, remedy)
    state: dict[str, dict[str, Any]] = {name: dict(values) for name, values in facts["scalars"].items()}
    for full, tensor in tensors.items():
        name, _, key = full.rpartition("/")
        state[name][key] = tensor
    options = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    # Tensors that were one (bitsandbytes' code tables, the same for all parameters) stay one after the move.
    copies: dict[tuple[int, torch.device], Tensor] = {}
    for name, parameter in _trained(optimizer, names).items():
        restored: dict[str, Any] = {}
        for key, value in state.get(name, {}).items():
            if not isinstance(value, Tensor):
                restored[key] = value
                continue
            device = _device_of(key, parameter, options[id(parameter)])
            if on_host is not None and on_host(parameter, value):
                device = torch.device("cpu")
            if (id(value), device) not in copies:
                copies[id(value), device] = value.to(device, copy=True)
            restored[key] = copies[id(value), device]
        if restored:
            optimizer.state[parameter] = restored
        else:
            optimizer.state.pop(parameter, None)


def _device_of(key: str, parameter: nn.Parameter, group: Mapping[str, Any]) -> torch.device:
    """Where torch's optimizers want a state tensor: `step` on the host, unless the kernel reads it on the device."""
    on_host = key == "step" and not (group.get("fused") or group.get("capturable"))
    return torch.device("cpu") if on_host else parameter.device


def _trained(optimizer: torch.optim.Optimizer, names: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    """The optimizer's parameters by name, in the order of `names`. Both sets must be the same."""
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    known = {id(parameter) for parameter in names.values()}
    if held != known:
        raise FinetuneError(
            f"the optimizer holds {len(held)} parameters, {len(held & known)} of the {len(known)} named ones"
        )
    return dict(names)


def _require_same(
    parameters: Mapping[str, nn.Parameter], saved: Mapping[str, tuple[list[int], str]], remedy: str
) -> None:
    missing = [name for name in parameters if name not in saved]
    added = [name for name in saved if name not in parameters]
    differing = []
    for name, parameter in parameters.items():
        mine = (list(parameter.shape), str(parameter.dtype))
        if name in saved and tuple(saved[name]) != mine:
            differing.append(f"{name}: saved {_described(*saved[name])}, now {_described(*mine)}")
    lists = (
        ("trained now, missing in the checkpoint", missing),
        ("in the checkpoint, not trained now", added),
        ("of another shape or type", differing),
    )
    if missing or added or differing:
        what = f"the checkpoint's {len(saved)} trained parameters are not this run's {len(parameters)}"
        text = "".join(f"\n    {title} ({len(names)}): {_listed(names)}" for title, names in lists if names)
        fallback = "resume with the model and adapter settings of the run's recipe.yaml, or start a new run"
        raise CheckpointError(what + text, "resume", remedy or fallback)


def _described(shape: list[int], kind: str) -> str:
    return f"{'x'.join(map(str, shape)) or 'scalar'} {kind.removeprefix('torch.')}"


def _listed(names: list[str]) -> str:
    rest = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + rest


def random_state() -> tuple[dict[str, Tensor], dict[str, Any]]:
    """States of the generators of torch (host and every GPU in use), numpy and Python: tensors and JSON facts."""
    tensors = {"torch": torch.get_rng_state()}
    # Only a process that already uses the GPU is asked: asking would start a context on it.
    if torch.cuda.is_initialized():
        for index, state in enumerate(torch.cuda.get_rng_state_all()):
            tensors[f"cuda.{index}"] = state
    kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    tensors["numpy"] = torch.from_numpy(np.asarray(keys).astype(np.int64))
    version, words, next_gauss = random.getstate()
    tensors["python"] = torch.tensor(words, dtype=torch.int64)
    facts = {
        "numpy": {"kind": str(kind), "position": int(position), "has_gauss": int(has_gauss), "gauss": float(gauss)},
        "python": {"version": version, "gauss": next_gauss},
    }
    return tensors, facts


def restore_random(tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> list[str]:
    """Sets the generators to what `random_state` saved. Call it last, after everything that draws numbers was built.

    Returns notices for GPUs whose generator was saved and are not here, or the reverse; those keep their own state.
    """
    torch.set_rng_state(tensors["torch"])
    numpy = facts["numpy"]
    keys = tensors["numpy"].numpy().astype(np.uint32)
    np.random.set_state((numpy["kind"], keys, numpy["position"], numpy["has_gauss"], numpy["gauss"]))
    python = facts["python"]
    random.setstate((python["version"], tuple(tensors["python"].tolist()), python["gauss"]))
    saved = sorted((name for name in tensors if name.startswith("cuda.")), key=lambda name: int(name[5:]))
    here = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for name in saved[:here]:
        torch.cuda.set_rng_state(tensors[name], int(name[5:]))
    if saved and len(saved) != here:
        return [
            f"the checkpoint has random states of {len(saved)} GPUs, this machine has {here}: the others start anew"
        ]
    return []
