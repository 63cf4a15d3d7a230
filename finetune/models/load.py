"""Models from the hub, a folder or the embedded ones: config, tokenizer, weights in their precision, checks, notices.

Weights are read from safetensors only, and code that a model brings runs only when the recipe says so. What this
toolkit cannot train exactly (other architectures, draws that cannot be keyed, logits changed after the head) is refused
by name before the first step. Frozen weights are held in the compute precision; trained weights in fp32 always, and
whatever that changes against the stored ones is said in a notice.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from finetune.config.schema import ModelSection, Recipe
from finetune.contracts import Model, Shape
from finetune.errors import ModelError
from finetune.kernels.precision import DTYPES
from finetune.models.adapters import attach, seeded
from finetune.models.chat_tokens import align_generation, stop_tokens, template_tokens, untrained_tokens
from finetune.models.config import load_config, loading, origin
from finetune.models.decoder import assemble, attention_windows
from finetune.models.quantized import check_stored, keep_layout, nf4_config, quantised_report
from finetune.models.source import Source, locate
from finetune.models.verify import verify

__all__ = ["align_generation", "load_config", "load_model", "load_tokenizer", "stop_tokens"]

Precision = Literal["fp32", "tf32", "bf16", "fp16"]


def load_tokenizer(section: ModelSection) -> Any:
    """The fast tokenizer, with a pad token (labels never depend on which). ModelError when there is none."""
    return _tokenizer(section)[0]


def _tokenizer(section: ModelSection) -> tuple[Any, list[str]]:
    source = locate(section)
    with loading(source, section):
        tokenizer = AutoTokenizer.from_pretrained(source.place, **origin(source, section))
    if not tokenizer.is_fast:
        raise ModelError(
            f"{type(tokenizer).__name__} gives no character offsets, which the labels are made from",
            where=section.path,
            remedy="use a model with a fast tokenizer (tokenizer.json)",
        )
    if tokenizer.pad_token_id is not None:
        return tokenizer, []
    chosen = tokenizer.eos_token or tokenizer.unk_token or tokenizer.bos_token or tokenizer.convert_ids_to_tokens(0)
    tokenizer.pad_token = chosen
    return tokenizer, [f"the tokenizer has no pad token; {chosen!r} is used (labels do not depend on it)"]


def load_model(
    recipe: Recipe,
    device: torch.device | str,
    precision: Precision,
    *,
    shape: Shape | None = None,
    training: bool = True,
) -> Model:
    """The recipe's model on `device`, with its adapter, checked, in eval mode; `notices` say what was decided.

    precision fp32, tf32: everything in fp32. bf16, fp16: frozen weights in it, trained weights in fp32 (the trainer computes
    under autocast; case B125). Random first weights come from train.seed alone (case B116). `shape` saves counting it again.
    training=False keeps all weights in the compute precision and skips the refusals that only training needs.
    Raises ModelError.
    """
    section, source = recipe.model, locate(recipe.model)
    config = load_config(section)
    if training:
        _check_draws(config, section)
    if recipe.data.pack:
        attention_windows(config)
    tokenizer, notices = _tokenizer(section)
    whole = training and recipe.adapter.kind == "none"
    if whole and section.base != "same":
        raise ModelError(
            f"model.base={section.base} stores frozen weights, but adapter.kind=none trains every parameter",
            where="model.base",
            remedy="set adapter.kind=lora, or model.base=same",
        )
    dtype = torch.float32 if whole else DTYPES[precision]
    stored = check_stored(config, section.base, section.path)
    notices += [stored] if stored else []
    notices += _precision_notices(
        config, dtype, section, precision if whole and precision in ("bf16", "fp16") else None
    )
    with seeded(recipe.train.seed):
        base, loading = _weights(source, section, config, dtype, torch.device(device))
    notices += loading
    _check_vocabulary(base, tokenizer, section)
    module: nn.Module = base
    if recipe.adapter.kind == "lora":
        module, attached = attach(base, recipe.adapter, source.name, recipe.train.seed)
        notices += attached + _chat_notices(base, tokenizer, recipe)
    notices += align_generation(base, tokenizer)
    if shape is None:
        from finetune.models.shapes import shape_of

        shape = shape_of(config)
    model = assemble(module, tokenizer, shape, source.name, tuple(notices))
    model.module.eval()
    verify(model, packed=recipe.data.pack, training=training)
    return model


def _weights(
    source: Source, section: ModelSection, config: Any, dtype: torch.dtype, device: torch.device
) -> tuple[Any, list[str]]:
    """The transformers model on `device`, and notices on tensors that the model class does not use."""
    source.require_safetensors(section.revision)
    arguments = {
        "config": config,
        "dtype": dtype,
        "attn_implementation": "sdpa" if section.attention == "auto" else section.attention,
        "use_safetensors": True,
        "output_loading_info": True,
    }
    notices = []
    if section.base == "nf4" and getattr(config, "quantization_config", None) is None:
        arguments["quantization_config"] = nf4_config(dtype)
    if section.base == "nf4" or device.type != "cpu":
        arguments["device_map"] = {"": str(device)}
    with loading(source, section):
        base, info = AutoModelForCausalLM.from_pretrained(source.place, **arguments, **origin(source, section))
    missing = sorted(info["missing_keys"])
    if missing:
        raise ModelError(
            f"{len(missing)} weights of {type(base).__name__} are missing ({missing[0]}) and would be random",
            where=section.path,
            remedy="use a complete checkpoint of this architecture",
        )
    if getattr(base, "peft_config", None):
        raise ModelError(
            "this is an adapter, not a model", section.path, "set model.path to its base and adapter.path to it"
        )
    if section.base == "nf4":
        keep_layout(base)
        notices += quantised_report(base)
    unused = sorted(info["unexpected_keys"])
    if unused:
        notices.append(f"{len(unused)} stored tensors are not used by {type(base).__name__} (such as {unused[0]})")
    return base, notices


def _check_draws(config: Any, section: ModelSection) -> None:
    """Attention dropout happens inside the attention function, where its draws cannot be keyed by row."""
    for field, value in config.to_dict().items():
        is_rate = ("dropout" in field or "pdrop" in field) and isinstance(value, int | float) and value > 0
        if is_rate and "attn" in field + field.replace("attention", "attn"):
            raise ModelError(
                f"{type(config).__name__} has {field}={value}: these draws come from the global generator, so "
                "micro-batch size and recomputation would change the result",
                where=section.path,
                remedy=f"copy the model to a folder, set {field} to 0 in its config.json, and use that as model.path",
            )


def _check_vocabulary(base: Any, tokenizer: Any, section: ModelSection) -> None:
    rows = base.get_input_embeddings().weight.shape[0]
    highest = max(tokenizer.get_vocab().values(), default=0)
    if highest >= rows:
        raise ModelError(
            f"the tokenizer has ids up to {highest} and the embedding {rows} rows",
            where=section.path,
            remedy="resize the embedding to the tokenizer and save both, or use the tokenizer that belongs to it",
        )


def _precision_notices(config: Any, dtype: torch.dtype, section: ModelSection, autocast: str | None) -> list[str]:
    notices = []
    stored = getattr(config, "dtype", None)
    stored = getattr(torch, stored, None) if isinstance(stored, str) else stored
    short = str(dtype).removeprefix("torch.")
    if autocast:
        notices.append(
            f"every parameter is trained: weights are held in fp32, products are made in {autocast} (autocast)"
        )
    elif stored not in (None, dtype) and section.base == "same":
        notices.append(f"weights are stored in {str(stored).removeprefix('torch.')} and held in {short}")
    if getattr(config, "router_aux_loss_coef", None):
        notices.append("the router's balance loss is not part of the training loss")
    return notices


def _chat_notices(base: Any, tokenizer: Any, recipe: Recipe) -> list[str]:
    """Case B21, where embedding and head rows stay frozen."""
    trained = {
        id(child) for name, child in base.named_modules() if hasattr(child, "lora_A") or hasattr(child, "lora_B")
    }
    if id(base.get_input_embeddings()) in trained and id(base.get_output_embeddings()) in trained:
        return []
    tokens = template_tokens(tokenizer) if recipe.data.template == "messages" else []
    if tokenizer.eos_token_id is not None and tokenizer.eos_token_id not in tokens:
        tokens = [*tokens, tokenizer.eos_token_id]
    return untrained_tokens(base, tokenizer, tokens)
