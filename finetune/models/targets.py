"""Which modules a name or a pattern of a recipe selects, with every entry held to select something."""

from __future__ import annotations

import difflib
import fnmatch

from torch import nn
from transformers.pytorch_utils import Conv1D

from finetune.errors import ModelError
from finetune.models.decoder import find_blocks

ALL_LINEAR = "all-linear"
LINEARS = (nn.Linear, Conv1D)


def match_targets(base: nn.Module, entries: tuple[str, ...], where: str = "adapter.targets") -> dict[str, list[str]]:
    """Entry: the full names of the modules that it selects.

    An entry is all-linear (every linear layer of the blocks), a name or dotted end of a name, or such a pattern with
    * and ?. Raises one ModelError that lists every entry that selects nothing, or something that cannot be adapted.
    """
    modules = dict(base.named_modules())
    found: dict[str, list[str]] = {}
    faults = []
    for entry in entries:
        if entry == ALL_LINEAR:
            names, others = block_linears(base), []
        else:
            selected = [name for name in modules if name and selects(entry, name)]
            names = [name for name in selected if isinstance(modules[name], (*LINEARS, nn.Embedding))]
            others = [name for name in selected if name not in names]
        if names and not others:
            found[entry] = names
        elif others:
            faults.append(
                f"{entry!r} selects {others[0]} ({type(modules[others[0]]).__name__}), which is not a linear layer"
            )
        else:
            leaves = sorted({name.rpartition(".")[2] for name, child in modules.items() if isinstance(child, LINEARS)})
            near = difflib.get_close_matches(entry.rpartition(".")[2], leaves, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"its linear layers are {', '.join(leaves)}"
            faults.append(f"{entry!r} matches nothing in {type(base).__name__}; {hint}")
    if faults:
        raise ModelError("; ".join(faults), where=where, remedy=f"name linear layers, or {ALL_LINEAR}")
    return found


def match_modules(base: nn.Module, entries: tuple[str, ...]) -> dict[str, list[str]]:
    """As `match_targets`, for entries that may select any module with parameters of its own or inside."""
    modules = {name: child for name, child in base.named_modules() if name and any(True for _ in child.parameters())}
    found = {entry: [name for name in modules if selects(entry, name)] for entry in entries}
    lost = [entry for entry, names in found.items() if not names]
    if lost:
        leaves = sorted({name.rpartition(".")[2] for name in modules} - {"0"})
        near = difflib.get_close_matches(lost[0].rpartition(".")[2], leaves, n=1)
        raise ModelError(
            f"{lost[0]!r} matches nothing with weights in {type(base).__name__}",
            where="adapter.modules_to_save",
            remedy=f"did you mean {near[0]!r}?" if near else "name modules such as embed_tokens, lm_head, norm",
        )
    return found


def short_names(base: nn.Module, chosen: set[str], by_end: bool = False) -> list[str]:
    """Last parts of the names where they select exactly these modules (serving tools expect that), else full names.

    `by_end`: the names will be matched as ends of text, so that norm would mean input_layernorm too.
    """
    last = sorted({name.rpartition(".")[2] for name in chosen})
    everything = [name for name, _ in base.named_modules()]
    if by_end:
        selected = {name for name in everything if name.endswith(tuple(last))}
    else:
        selected = {name for name in everything if name.rpartition(".")[2] in last}
    return last if selected == chosen else sorted(chosen)


def selects(entry: str, name: str) -> bool:
    """Whether an entry of a recipe means the module (or parameter) of this name."""
    if any(sign in entry for sign in "*?["):
        return fnmatch.fnmatchcase(name, entry) or fnmatch.fnmatchcase(name, f"*.{entry}")
    return name == entry or name.endswith(f".{entry}")


def block_linears(base: nn.Module) -> list[str]:
    """Full names of the linear layers inside the repeated blocks: neither head nor embedding."""
    inside = {id(child) for block in find_blocks(base) for child in block.modules() if isinstance(child, LINEARS)}
    return [name for name, child in base.named_modules() if id(child) in inside]
