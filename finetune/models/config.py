"""A model's config: read from a folder or the hub, and refused by name when it is no causal language model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging as transformers_logging

from finetune.config.schema import ModelSection
from finetune.errors import FinetuneError, ModelError
from finetune.kernels.logits_change import logits_change
from finetune.models.source import Source, hub_fault, locate


def load_config(section: ModelSection) -> Any:
    """The transformers config of a causal language model; ModelError for anything else, by name.

    With model.layers, it is the config of its first blocks.
    """
    source = locate(section)
    with loading(source, section):
        config = AutoConfig.from_pretrained(source.place, **origin(source, section))
    _check_architecture(config, section)
    if section.layers is not None:
        _keep_first(config, section.layers, section.path)
    return config


def check_layers(layers: int, blocks: int, where: str) -> None:
    """ModelError when a model of `blocks` blocks is asked for more."""
    if layers > blocks:
        raise ModelError(f"model.layers={layers}, but {where} has {blocks} blocks", "model.layers", f"at most {blocks}")


def _keep_first(config: Any, layers: int, where: str) -> None:
    """Makes the config that of a model of its first `layers` blocks."""
    check_layers(layers, config.num_hidden_layers, where)
    config.num_hidden_layers = layers
    for name, value in config.to_dict().items():
        # What a config says block by block, such as the kinds of attention.
        if name in ("layer_types", "mlp_layer_types") and isinstance(value, list):
            setattr(config, name, value[:layers])


def origin(source: Source, section: ModelSection) -> dict[str, Any]:
    """What every from_pretrained of transformers is told about where to read."""
    return {
        "revision": section.revision if source.hub and section.revision else "main",
        "trust_remote_code": section.trust_remote_code,
        "local_files_only": not source.hub or source.offline,
    }


@contextmanager
def loading(source: Source, section: ModelSection) -> Iterator[None]:
    """No progress bars and no log lines of transformers; what it raises over a model's files is one ModelError."""
    bars, level = transformers_logging.is_progress_bar_enabled(), transformers_logging.get_verbosity()
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    try:
        yield
    except (torch.OutOfMemoryError, FinetuneError):
        raise
    except Exception as error:
        # Broken files raise nearly anything (tokenizers raises bare Exceptions): none is a fault of this program.
        raise hub_fault(error, source, section.trust_remote_code) from error
    finally:
        transformers_logging.set_verbosity(level)
        if bars:
            transformers_logging.enable_progress_bar()


def _check_architecture(config: Any, section: ModelSection) -> None:
    name = f"{type(config).__name__} (model type {config.model_type})"
    own_code = section.trust_remote_code and "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
    reason = None
    if getattr(config, "is_encoder_decoder", False):
        reason = "is an encoder-decoder"
    elif config.get_text_config() is not config:
        reason = "has parts other than text (images, sound)"
    elif config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and not own_code:
        reason = "is not a causal language model that transformers knows"
    if reason:
        raise ModelError(f"{name} {reason}", section.path, "use a text decoder such as Llama, Mistral or Qwen")
    logits_change(config)  # refuses a change that the loss does not know
    if getattr(config, "attn_logit_softcapping", None) is not None and section.attention != "eager":
        raise ModelError(
            f"{name} caps its attention scores, which only the eager attention does",
            where="model.attention",
            remedy="set model.attention=eager",
        )
