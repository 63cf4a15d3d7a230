"""Parameter groups: which tensors are decayed, and which are embeddings or the head.

Weight decay pulls matrices towards zero; doing so to norms, biases and embeddings only takes away what few rows of
data taught them. A recipe may set rates and decays by name patterns. The order inside every group is the model's, so the same model always gives the same groups and a
saved optimizer finds its tensors again.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from finetune.config.group_text import group_changes
from finetune.errors import InputError

if TYPE_CHECKING:
    from torch import nn

EMBEDDING = "embedding"
HEAD = "head"

EMBEDDING_NAMES = ("wte", "wpe", "shared", "word_embeddings", "position_embeddings", "embeddings")
"""Names of embedding modules that do not have `embed_` or `lora_embedding_` in them."""
HEAD_NAMES = ("lm_head", "embed_out", "output_projection", "output_layer", "score")
"""Names of output projections in the model classes of transformers."""
WRAPPERS = ("modules_to_save", "original_module", "base_layer")
"""Names that adapter wrappers put between a module and its weight."""


def role_by_name(name: str) -> str:
    """`embedding`, `head` or `` (another tensor), from a parameter's dotted name. The planner, which has no modules, uses this."""
    parts = name.split(".")
    if any(part in ("lora_embedding_A", "lora_embedding_B") for part in parts):
        return EMBEDDING
    wrapped = [index for index, part in enumerate(parts) if part in WRAPPERS]
    owner_at = wrapped[0] - 1 if wrapped else len(parts) - 2
    owner = parts[owner_at] if owner_at >= 0 else ""
    if owner in HEAD_NAMES:
        return HEAD
    if (
        owner in EMBEDDING_NAMES
        or owner.startswith("embed_")
        or owner.endswith(("_embed", "_embeddings", "_embedding"))
    ):
        return EMBEDDING
    return ""


def roles_of(module: nn.Module) -> dict[str, str]:
    """Roles (as `role_by_name`) of a module's parameters, from the modules themselves: right whatever their names are.

    Embeddings are those of type Embedding, the head is what `get_output_embeddings` of transformers' classes gives; an
    embedding that is also the head is an embedding. Names are those of `module.named_parameters()`.
    """
    from torch import nn as torch_nn

    embeddings = {
        id(parameter)
        for part in module.modules()
        if isinstance(part, torch_nn.Embedding)
        for parameter in part.parameters(recurse=False)
    }
    output = module.get_output_embeddings() if hasattr(module, "get_output_embeddings") else None
    inside = dict(output.named_parameters()) if output is not None else {}
    head = {id(parameter) for name, parameter in inside.items() if "lora_" not in name}
    return {
        name: EMBEDDING if id(parameter) in embeddings else HEAD if id(parameter) in head else role_by_name(name)
        for name, parameter in module.named_parameters()
    }


def parameter_groups(
    named: Mapping[str, nn.Parameter],
    weight_decay: float,
    roles: Mapping[str, str] | None = None,
    wanted: Mapping[str, str] | None = None,
) -> list[dict[str, Any]]:
    """Groups for a torch optimizer: decayed, not decayed, then one or two for each pattern of `wanted`; empty ones left out.

    Decayed are tensors of two and more dimensions that are not embeddings. `wanted` are the recipe's `optimizer.groups`: a
    tensor belongs to the first pattern that its name matches; InputError for one that is left with none. A group holds `params`,
    their `names`, `roles` and `places` (numbers in model order) beside them, `weight_decay`, and `lr_factor`, which the loop
    multiplies the rate with. Roles come from `roles` (of `roles_of`), else from the name.
    """
    role = {name: (roles or {}).get(name, role_by_name(name)) for name in named}
    chosen = {name: _pattern_of(name, wanted or {}) for name in named}
    patterns = list(wanted or {})
    for pattern in patterns:
        if pattern not in chosen.values():
            raise InputError(
                f"no trained parameter is left for the pattern {pattern!r}",
                "optimizer.groups",
                f"names look like {next(iter(named))}; of several patterns the first that matches counts",
            )
    groups = []
    for each in (None, *patterns):
        changes = group_changes((wanted or {})[each]) if each is not None else {}
        mine = [name for name in named if chosen[name] == each]
        decayed = [name for name in mine if named[name].dim() >= 2 and role[name] != EMBEDDING]
        plain = [name for name in mine if name not in set(decayed)]
        parts = [(decayed, weight_decay), (plain, 0.0)]
        if "weight_decay" in changes:
            parts = [(mine, changes["weight_decay"])]
        groups += [_group(names, named, role, decay, changes.get("lr_factor", 1.0)) for names, decay in parts if names]
    return groups


def _pattern_of(name: str, wanted: Mapping[str, str]) -> str | None:
    return next((pattern for pattern in wanted if fnmatch.fnmatchcase(name, pattern)), None)


def _group(
    names: list[str], named: Mapping[str, nn.Parameter], role: Mapping[str, str], decay: float, factor: float
) -> dict[str, Any]:
    places = {name: place for place, name in enumerate(named)}
    return {
        "params": [named[name] for name in names],
        "names": names,
        "roles": [role[name] for name in names],
        "places": [places[name] for name in names],
        "weight_decay": decay,
        "lr_factor": factor,
    }


PER_TENSOR = ("params", "names", "roles", "places")
"""Keys of a group that have an entry for every tensor."""


def divide(
    groups: list[dict[str, Any]], kind: Callable[[int, str, nn.Parameter], Any], key: str
) -> list[dict[str, Any]]:
    """Each group cut by `kind(elements, role, parameter)`, which the parts hold under `key`; order kept, empty parts left out."""
    parts = []
    for group in groups:
        kinds = [kind(p.numel(), role, p) for p, role in zip(group["params"], group["roles"], strict=True)]
        for value in dict.fromkeys(kinds):
            here = [index for index, other in enumerate(kinds) if other == value]
            parts.append({**group, **{name: [group[name][i] for i in here] for name in PER_TENSOR}, key: value})
    return parts
