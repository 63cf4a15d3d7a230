"""Models from the hub, a folder or the embedded ones: config, tokenizer, weights in their precision, checks, notices.

Weights are read from safetensors only, and code that a model brings runs only when the recipe says so. What this
toolkit cannot train exactly (other architectures, draws that cannot be keyed, logits changed after the head) is refused
by name before the first step. Frozen weights are held in the compute precision; trained weights as `model.trained` says
(adapters in fp32 always), and whatever that changes against the stored ones is said in a notice.
"""

from __future__ import annotations

import traceback
from contextlib import nullcontext
from typing import Any, Literal

import torch
from peft.utils import TrainableTokensWrapper
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from finetune.config.schema import ModelSection, Recipe
from finetune.contracts import Model, Shape
from finetune.errors import ModelError
from finetune.kernels.precision import DTYPES
from finetune.models import direct
from finetune.models.adapters import attach, seeded
from finetune.models.chat_tokens import align_generation, stop_tokens, template_tokens, untrained_tokens
from finetune.models.config import load_config, loading, origin
from finetune.models.decoder import assemble, attention_windows
from finetune.models.new_tokens import extend, give_rows, tokens_of
from finetune.models.quantized import check_stored, keep_layout, nf4_config, quantised_report
from finetune.models.random_weights import make
from finetune.models.shapes import shape_of
from finetune.models.skeleton import Making
from finetune.models.source import Source, locate
from finetune.models.storing import STORED, Storing
from finetune.models.trained import check_rows_trained, choose, is_partial
from finetune.models.verify import verify
from finetune.models.weight_files import open_files

__all__ = ["align_generation", "load_base", "load_config", "load_model", "load_tokenizer", "stop_tokens"]

Precision = Literal["fp32", "tf32", "bf16", "fp16"]

CHATS = ("messages", "sharegpt", "chatml", "llama3", "mistral", "qwen", "gemma")
"""Data templates whose rows are conversations, so that the chat tokens stand in every row."""


def load_tokenizer(section: ModelSection) -> Any:
    """The fast tokenizer, with the recipe's new tokens and a pad token (labels never depend on which).

    ModelError when there is none.
    """
    return _tokenizer(section)[0]


def _tokenizer(section: ModelSection) -> tuple[Any, tuple[int, ...], list[str]]:
    """The tokenizer, the ids of tokens that were added to it, and notices."""
    source = locate(section)
    with loading(source, section):
        tokenizer = AutoTokenizer.from_pretrained(source.place, **origin(source, section))
    if not tokenizer.is_fast:
        raise ModelError(
            f"{type(tokenizer).__name__} gives no character offsets, which the labels are made from",
            where=section.path,
            remedy="use a model with a fast tokenizer (tokenizer.json)",
        )
    new_ids, notices = extend(tokenizer, section)
    if tokenizer.pad_token_id is not None:
        return tokenizer, new_ids, notices
    chosen = tokenizer.eos_token or tokenizer.unk_token or tokenizer.bos_token or tokenizer.convert_ids_to_tokens(0)
    tokenizer.pad_token = chosen
    notices.append(f"the tokenizer has no pad token; {chosen!r} is used (labels do not depend on it)")
    return tokenizer, new_ids, notices


def load_model(
    recipe: Recipe,
    place: torch.device | str | Any,
    precision: Precision,
    *,
    shape: Shape | None = None,
    tokenizer: Any = None,
    training: bool = True,
) -> Model:
    """The recipe's model on the device `place`, with its adapter, checked, in eval mode; `notices` say what was decided.

    precision fp32, tf32: everything in fp32. bf16, fp16: frozen weights in it, trained weights as `model.trained` says (fp32:
    the trainer computes under autocast; case B125). Random first weights come from train.seed alone (case B116). `shape` saves
    counting it again; `tokenizer` is the one that rows were written with, and may carry a chat template that the folder lacks.
    training=False keeps all weights in the compute precision and skips the refusals that only training needs.
    A `place` that is no device (memory/streaming/host_blocks) is handed the blocks as they are made and keeps them; when
    loading ends early, by an error or Ctrl-C, it gives its memory back. Raises ModelError.
    """
    host = None if isinstance(place, torch.device | str) else place
    if host is None:
        return _loaded(recipe, torch.device(place), precision, (None, shape, tokenizer, training))
    try:
        return _loaded(recipe, host.device, precision, (host, shape, tokenizer, training))
    except BaseException as error:
        arrived = f"{len(host.flats)} of {host.blocks} blocks were in host memory, which is given back"
        host.abandon()
        _forget(error)
        if isinstance(error, KeyboardInterrupt):
            raise KeyboardInterrupt(f"while {recipe.model.path} was loaded: {arrived}") from None
        raise


def _forget(error: BaseException) -> None:
    """Clears the frames that an error and its causes point to: what they hold (a model half made, a block half read) would
    live for as long as the error is looked at."""
    seen: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and link not in seen:
        seen.append(link)
        traceback.clear_frames(link.__traceback__)
        link = link.__cause__ or link.__context__


def _loaded(recipe: Recipe, device: torch.device, precision: Precision, given: Any) -> Model:
    host, shape, tokenizer, training = given
    section, source = recipe.model, locate(recipe.model)
    config = load_config(section)
    if training:
        _check_draws(config, section)
    if recipe.data.pack:
        attention_windows(config)
    own, new_ids, notices = _tokenizer(section)
    tokenizer = own if tokenizer is None else tokenizer
    whole = training and recipe.adapter.kind == "none"
    _check_base(section, whole)
    trained = trained_dtype(section, precision) if whole else DTYPES[precision]
    partial, dtype = whole and is_partial(recipe.train), trained
    if partial and (source.random or _stored_dtype(config) == DTYPES[precision]):
        dtype = DTYPES[precision]  # nothing is lost, and the frozen part is never held in fp32
    stored = check_stored(config, section.base, section.path)
    notices += [stored] if stored else []
    narrow = precision if whole and not partial and precision in ("bf16", "fp16") else None
    notices += _precision_notices(config, dtype, section, narrow)
    with seeded(recipe.train.seed):
        base, loading = _base(recipe, source, config, dtype, device, host)
    notices += loading + give_rows(base, new_ids)
    _check_vocabulary(base, tokenizer, section)
    module: nn.Module = base
    if recipe.adapter.kind != "none":
        module, attached = attach(base, recipe.adapter, source.name, recipe.train.seed, new_ids, tokens_of(section))
        notices += attached + _chat_notices(base, tokenizer, recipe)
    elif partial:
        notices += choose(base, recipe.train, DTYPES[precision], trained)
        check_rows_trained(base, new_ids)
    notices += align_generation(base, tokenizer)
    shape = shape_of(config) if shape is None else shape
    model = assemble(module, tokenizer, shape, source.name, tuple(notices))
    model.home = device
    if host is not None:
        host.rest(model.module, list(model.blocks), _ends(model))
    model.module.eval()
    with (
        nullcontext() if host is None else host.whole(),
        torch.autocast(device.type, DTYPES[precision], enabled=_is_mixed(module, precision)),
    ):
        verify(model, packed=recipe.data.pack, training=training)
    return model


def _ends(model: Model) -> dict[str, nn.Module]:
    """Embedding and head, where they are a matrix and nothing more."""
    sides = {"embedding": model.base.get_input_embeddings(), "head": model.base.get_output_embeddings()}
    return {name: side for name, side in sides.items() if type(side) in (nn.Embedding, nn.Linear)}


def _is_mixed(module: nn.Module, precision: Precision) -> bool:
    """Whether whole layers in fp32 meet frozen ones in 16 bits: only autocast makes them one model, as in training."""
    kinds = {parameter.dtype for name, parameter in module.named_parameters() if ".lora_" not in name}
    return precision in ("bf16", "fp16") and len(kinds) > 1


def _check_base(section: ModelSection, whole: bool) -> None:
    if whole and section.base != "same":
        raise ModelError(
            f"model.base={section.base} stores frozen weights, but adapter.kind=none trains every parameter",
            where="model.base",
            remedy="set adapter.kind=lora, or model.base=same",
        )


def load_base(recipe: Recipe, device: torch.device | str, precision: Precision) -> str | nn.Module:
    """What a peft adapter of this recipe is put on: the place that transformers loads it from, or, where no file holds
    it as it is (random weights, fewer blocks, new tokens), the model made anew."""
    section, source = recipe.model, locate(recipe.model)
    if not source.random and section.layers is None and section.base not in STORED and not tokens_of(section):
        return source.place
    base = _base(recipe, source, load_config(section), DTYPES[precision], torch.device(device))[0]
    give_rows(base, _tokenizer(section)[1])
    return base


def _base(
    recipe: Recipe, source: Source, config: Any, dtype: torch.dtype, device: torch.device, host: Any = None
) -> tuple[Any, list[str]]:
    section = recipe.model
    if source.random:
        return _random(recipe, config, dtype, device, host)
    source.require_safetensors(section.revision)
    if host is None:
        if not source.hub:
            with loading(source, section):
                open_files(source, section)  # says by name which file is cut short
        return _weights(source, section, config, dtype, device)
    store = Storing(section.base) if section.base in STORED else None
    with loading(source, section):
        found = direct.read(source, section, config, _making(recipe, dtype, device), host, store)
    if isinstance(found, str):
        base, notices = _weights(source, section, config, dtype, torch.device("cpu"), device)
        how = (
            f"the weights are read by transformers into ordinary memory and go to the host's pages from there ({found})"
        )
        return base, [*notices, f"{how}: nothing is lost, but loading takes longer and more host memory"]
    return found.base, _said(found.base, section, store, found.unused) + found.notices


def _making(recipe: Recipe, dtype: torch.dtype, device: torch.device) -> Making:
    section = recipe.model
    attention = "sdpa" if section.attention == "auto" else section.attention
    return Making(dtype, device, recipe.train.seed, attention, section.base == "nf4", section.double_quant)


def _said(base: Any, section: ModelSection, store: Storing | None, unused: list[str]) -> list[str]:
    """Notices on a model that was read from files, however it was."""
    notices = []
    if section.base == "nf4":
        keep_layout(base)
        notices += quantised_report(base)
    if store is not None:
        notices += store.report(base)
    if section.layers is not None:
        notices.append(
            f"only the first {section.layers} blocks are used (model.layers): this is another, smaller model"
        )
    if unused:
        notices.append(f"{len(unused)} stored tensors are not used by {type(base).__name__} (such as {unused[0]})")
    return notices


def _weights(
    source: Source,
    section: ModelSection,
    config: Any,
    dtype: torch.dtype,
    device: torch.device,
    storing: torch.device | None = None,
) -> tuple[Any, list[str]]:
    """The transformers model on `device`, and notices on tensors that the model class does not use. `storing`: where
    weights are put into 8 bits, if not there."""
    arguments = {
        "config": config,
        "dtype": dtype,
        "attn_implementation": "sdpa" if section.attention == "auto" else section.attention,
        "use_safetensors": True,
        "output_loading_info": True,
    }
    if section.base == "nf4" and getattr(config, "quantization_config", None) is None:
        arguments["quantization_config"] = nf4_config(dtype, section.double_quant)
    # What is to be stored in 8 bits comes through host memory, so that the device never holds the whole model unstored.
    if section.base == "nf4" or (device.type != "cpu" and section.base not in STORED):
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
    store = Storing(section.base) if section.base in STORED else None
    if store is not None:
        store.blocks(base, storing or device, device)
        base.to(device)
    return base, _said(base, section, store, sorted(info["unexpected_keys"]))


def _random(recipe: Recipe, config: Any, dtype: torch.dtype, device: torch.device, host: Any) -> tuple[Any, list[str]]:
    """A model of an embedded shape without weights, and the notices on it."""
    section = recipe.model
    store = Storing(section.base) if section.base in STORED else None
    base = make(config, _making(recipe, dtype, device), store, host)
    notices = [f"the weights of {section.path} are random (train.seed={recipe.train.seed}); no file holds them"]
    if section.base == "nf4":
        keep_layout(base)
        notices += quantised_report(base)
    return base, notices + (store.report(base) if store else [])


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


TRAINED_NOTICES = {
    "fp32": "weights are held in fp32, products are made in {precision} (autocast)",
    "stochastic": "weights and gradients are bf16; each update is made in fp32 and rounded up or down by a keyed draw",
    "split": "weights and gradients are bf16; the optimizer holds the other 16 bits of each weight, so updates are those of fp32",
    "bf16": "weights and gradients are plain bf16: updates smaller than 1/512 of a weight are lost, so at small learning rates "
    "nothing is learned (model.trained=stochastic or split keeps them)",
}
"""What is said of `model.trained` (case B127)."""


def trained_dtype(section: ModelSection, precision: Precision) -> torch.dtype:
    """The dtype of weights that are trained. ModelError for 16-bit weights that would be computed with in fp32."""
    if section.trained == "fp32":
        return torch.float32
    if precision != "bf16":
        raise ModelError(
            f"model.trained={section.trained} keeps weights in bf16, and this run computes in {precision}",
            where="model.trained",
            remedy="model.precision=bf16, or model.trained=fp32",
        )
    return torch.bfloat16


def _precision_notices(config: Any, dtype: torch.dtype, section: ModelSection, narrow: str | None) -> list[str]:
    notices = []
    stored = _stored_dtype(config)
    short = str(dtype).removeprefix("torch.")
    if narrow:
        notices.append(f"every parameter is trained: {TRAINED_NOTICES[section.trained].format(precision=narrow)}")
        if section.trained != "fp32" and stored not in (None, torch.bfloat16):
            kind = str(stored).removeprefix("torch.")
            notices.append(f"weights are stored in {kind}; what bf16 cannot show of them is rounded away at loading")
    elif stored not in (None, dtype) and section.base == "same":
        notices.append(f"weights are stored in {str(stored).removeprefix('torch.')} and held in {short}")
    if getattr(config, "router_aux_loss_coef", None):
        notices.append("the router's balance loss is not part of the training loss")
    return notices


def _stored_dtype(config: Any) -> torch.dtype | None:
    stored = getattr(config, "dtype", None)
    return getattr(torch, stored, None) if isinstance(stored, str) else stored


def _chat_notices(base: Any, tokenizer: Any, recipe: Recipe) -> list[str]:
    """Case B21, where embedding and head rows stay frozen."""
    sides = (base.get_input_embeddings(), base.get_output_embeddings())
    if all(_is_trained(side) for side in sides):
        return []
    tokens = template_tokens(tokenizer) if recipe.data.template in CHATS else []
    if tokenizer.eos_token_id is not None and tokenizer.eos_token_id not in tokens:
        tokens = [*tokens, tokenizer.eos_token_id]
    return untrained_tokens(base, tokenizer, tokens)


def _is_trained(side: nn.Module) -> bool:
    """Whether the rows of any token can move: single trained rows are those of new tokens alone."""
    whole = not isinstance(side, TrainableTokensWrapper)
    return whole and any(parameter.requires_grad for parameter in side.parameters())
