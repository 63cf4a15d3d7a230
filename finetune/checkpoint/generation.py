"""A base model's generation settings, made such that they can be saved.

transformers refuses to write settings that contradict each other (a temperature with sampling off), which bases do
carry. Answers must not change, so what has no effect anyway is dropped, and each change is told.
"""

from __future__ import annotations

import copy

from torch import nn
from transformers import GenerationConfig

SAMPLING_ONLY = ("temperature", "top_p", "top_k", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff")
BEAMS_ONLY = ("early_stopping", "length_penalty")
TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")


def sound_generation_config(base: nn.Module) -> tuple[GenerationConfig | None, list[str]]:
    """A copy of the base's generation settings that transformers saves, and a notice for each change; None where it has none.

    With sampling off, sampling-only values are dropped, with one beam those for beams: greedy answers stay the same. If
    that is not enough, only the special tokens are kept.
    """
    held = getattr(base, "generation_config", None)
    if held is None:
        return None, []
    config = copy.deepcopy(held)
    if _fault(config) == "":
        return config, []
    idle = () if config.do_sample is True else SAMPLING_ONLY
    idle += BEAMS_ONLY if config.num_beams in (None, 1) else ()
    plain = GenerationConfig()
    dropped = []
    for name in idle:
        value = getattr(config, name, None)
        if value is not None and value != getattr(plain, name, None):
            dropped.append(f"{name}={value}")
            setattr(config, name, getattr(plain, name, None))
    fault = _fault(config)
    if fault == "":
        return config, [f"generation settings of the base that have no effect are not saved: {', '.join(dropped)}"]
    tokens = {name: getattr(held, name) for name in TOKENS if getattr(held, name, None) is not None}
    reason = fault.strip().splitlines()[0]
    return GenerationConfig(**tokens), [
        f"generation settings of the base are not valid; only its tokens are kept: {reason}"
    ]


def _fault(config: GenerationConfig) -> str:
    """Why transformers would not save it, or an empty text."""
    try:
        config.validate(strict=True)
    except (ValueError, TypeError) as error:
        return str(error) or type(error).__name__
    return ""
