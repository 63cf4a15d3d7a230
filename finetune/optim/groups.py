"""Parameter groups: which tensors are decayed, and which are embeddings or the head.

Weight decay pulls matrices towards zero; doing so to norms, biases and embeddings only takes away what few rows of
data taught them. The order inside every group is the model's, so the same model always gives the same groups and a
saved optimizer finds its tensors again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

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
    named: Mapping[str, nn.Parameter], weight_decay: float, roles: Mapping[str, str] | None = None
) -> list[dict[str, Any]]:
    """Two groups for a torch optimizer, empty ones left out: decayed, then not decayed.

    Decayed are tensors of two and more dimensions that are not embeddings. A group holds `params`, their `names` beside
    them (same order, the model's), the `roles` of these, and `weight_decay`. Roles come from `roles` (of `roles_of`),
    else from the name.
    """
    decayed: list[str] = []
    plain: list[str] = []
    role = {name: (roles or {}).get(name, role_by_name(name)) for name in named}
    for name, parameter in named.items():
        (decayed if parameter.dim() >= 2 and role[name] != EMBEDDING else plain).append(name)
    return [
        {
            "params": [named[name] for name in names],
            "names": names,
            "roles": [role[name] for name in names],
            "weight_decay": decay,
        }
        for names, decay in ((decayed, weight_decay), (plain, 0.0))
        if names
    ]
