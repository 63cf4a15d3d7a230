"""What some families of models do to their logits after the head, as functions: capped, multiplied, divided.

The loss is made from the head's input and not by the model's own forward, so it applies the same change; loading tries
it against the model's own logits before the first step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from finetune.errors import ModelError

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class LogitsRule:
    """How a family of models changes its logits: `change(value)` is the function of logits for the config's value."""

    attribute: str
    families: tuple[str, ...]
    change: Callable[[float], Callable[[Tensor], Tensor]]


def _capped(cap: float) -> Callable[[Tensor], Tensor]:
    return lambda logits: (logits / cap).tanh() * cap


def _multiplied(factor: float) -> Callable[[Tensor], Tensor]:
    return lambda logits: logits * factor


def _divided(divisor: float) -> Callable[[Tensor], Tensor]:
    return lambda logits: logits / divisor


LOGITS_RULES = (
    LogitsRule("final_logit_softcapping", ("gemma", "vaultgemma", "nanochat"), _capped),
    LogitsRule("logits_scaling", ("granite",), _divided),
    LogitsRule("logits_scaling", ("hyperclovax",), _multiplied),
    LogitsRule("logit_scale", ("cohere",), _multiplied),
    LogitsRule("lm_head_multiplier", ("falcon_h1",), _multiplied),
)
"""By the config's attribute and the start of its model type: one name means division here and multiplication there."""


def logits_change(config: Any) -> Callable[[Tensor], Tensor] | None:
    """What the model does to its logits after the head, or None. ModelError for a model whose way is not known."""
    if config is None:
        return None
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    family = str(getattr(text, "model_type", ""))
    for attribute in dict.fromkeys(rule.attribute for rule in LOGITS_RULES):
        value = getattr(text, attribute, None)
        if value is None or (value == 1.0 and attribute != "final_logit_softcapping"):
            continue
        for rule in LOGITS_RULES:
            if rule.attribute == attribute and family.startswith(rule.families):
                return rule.change(float(value))
        raise ModelError(
            f"models of type '{family}' change their logits ({attribute}={value}) in a way that is not known here",
            where="model.path",
            remedy="choose another model, or report this one",
        )
    return None
