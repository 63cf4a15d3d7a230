"""Chat tokens of a model: where its turns end, whether its rows were ever trained, and generation settings that agree.

The chat template decides what ends a turn. If the saved settings name another token, a served model never stops; so the
template is rendered once and its turn end is read from the result, never guessed from names.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

SAMPLING_FIELDS = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 50,
    "min_p": None,
    "top_h": None,
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
}
"""Settings that only sampling uses, with the value that says nothing; others cannot be saved without sampling."""
ANSWER = "zebra"
"""A word that no template contains."""


def turn_end(tokenizer: Any) -> int | None:
    """The first special token after an assistant's words in the chat template; None if there is none."""
    text = _rendered(tokenizer)
    if text is None or ANSWER not in text:
        return None
    tail = text[text.rindex(ANSWER) + len(ANSWER) :]
    special = special_ids(tokenizer)
    return next((token for token in tokenizer(tail, add_special_tokens=False)["input_ids"] if token in special), None)


def template_tokens(tokenizer: Any) -> list[int]:
    """Special tokens that the chat template writes, ascending."""
    text = _rendered(tokenizer)
    if text is None:
        return []
    return sorted(special_ids(tokenizer) & set(tokenizer(text, add_special_tokens=False)["input_ids"]))


def special_ids(tokenizer: Any) -> set[int]:
    """Ids of tokens that are never made from ordinary text."""
    return set(tokenizer.added_tokens_decoder) | set(tokenizer.all_special_ids)


def _rendered(tokenizer: Any) -> str | None:
    return _exchange(tokenizer)[0]


def _exchange(tokenizer: Any) -> tuple[str | None, str]:
    """A question and an answer as the chat template writes them, or None and the reason; neither where there is none."""
    if not tokenizer.chat_template:
        return None, ""
    talk = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": ANSWER}]
    try:
        return tokenizer.apply_chat_template(talk, tokenize=False), ""
    except Exception as error:
        # A template is a program of the model's folder and may raise anything. Runs that do not use it go on.
        return None, " ".join(str(error).split())[:200] or type(error).__name__


def stop_tokens(tokenizer: Any, base: Any) -> tuple[int, ...]:
    """Ids that end a generation: the template's turn end, the tokenizer's end, then those of the model's own settings.

    `base` is the transformers model (Model.base).
    """
    found = [turn_end(tokenizer), tokenizer.eos_token_id]
    found += _ids(getattr(base.generation_config, "eos_token_id", None)) + _ids(base.config.eos_token_id)
    return tuple(dict.fromkeys(token for token in found if token is not None))


def _ids(value: int | Iterable[int] | None) -> list[int]:
    if value is None:
        return []
    return [value] if isinstance(value, int) else list(value)


def align_generation(base: Any, tokenizer: Any) -> list[str]:
    """Makes generation config, model config and tokenizer agree on where to stop and what to pad with; returns notices.

    Generation settings that transformers would refuse to save are dropped (cases B19, B104).
    """
    from transformers import GenerationConfig

    if base.generation_config is None:
        base.generation_config = GenerationConfig.from_model_config(base.config)
    generation, stops = base.generation_config, stop_tokens(tokenizer, base)
    notices = []
    reason = _exchange(tokenizer)[1]
    if reason:
        notices.append(
            f"the chat template cannot write a question and an answer, so the token that ends its turns is not known and "
            f"generation may not stop at it: {reason}"
        )
    lacking = [token for token in stops if token not in _ids(generation.eos_token_id)]
    if lacking:
        names = ", ".join(f"{tokenizer.convert_ids_to_tokens(token)!r} ({token})" for token in lacking)
        before = _ids(generation.eos_token_id) or "none"
        notices.append(f"generation also stops at {names}: the base's generation config stops at {before} only")
    if stops:
        ends = stops[0] if len(stops) == 1 else list(stops)
        if lacking:
            generation.eos_token_id = ends
        if set(_ids(base.config.eos_token_id)) != set(stops):
            base.config.eos_token_id = ends
    if generation.pad_token_id is None:
        generation.pad_token_id = tokenizer.pad_token_id
    return notices + _drop_invalid(base)


def _drop_invalid(base: Any) -> list[str]:
    """Case B104: settings of the base that would make every save fail."""
    from transformers import GenerationConfig

    generation, dropped = base.generation_config, []
    if generation.do_sample is not True:
        for name, silent in SAMPLING_FIELDS.items():
            value = getattr(generation, name, None)
            if value is not None and value != silent:
                setattr(generation, name, None)
                dropped.append(f"{name}={value}")
    notices = [f"generation settings dropped, they need do_sample=true: {', '.join(dropped)}"] if dropped else []
    try:
        generation.validate(strict=True)
    except ValueError as error:
        kept = {name: getattr(generation, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
        base.generation_config = GenerationConfig(**kept)
        reason = " ".join(str(error).split())[:200]
        notices.append(f"the base's generation settings are invalid and dropped, its special tokens are kept: {reason}")
    return notices


def untrained_tokens(base: Any, tokenizer: Any, tokens: Iterable[int]) -> list[str]:
    """Case B21: notices on `tokens` whose embedding or head row is zero or the same as another token's.

    Such rows were never trained; an adapter that leaves embedding and head alone can neither tell them apart nor
    predict one of them.
    """
    matrices = {"embedding": base.get_input_embeddings().weight, "head": base.get_output_embeddings().weight}
    if matrices["embedding"] is matrices["head"]:
        matrices = {"embedding and head": matrices["embedding"]}
    notices = []
    for place, weight_VD in matrices.items():
        weak = [token for token in tokens if _never_trained(weight_VD.detach(), token)]
        if weak:
            names = ", ".join(repr(tokenizer.convert_ids_to_tokens(token)) for token in weak)
            notices.append(
                f"{names}: the row in the {place} is zero or equal to another token's, so it was never trained, and "
                "this adapter leaves it frozen; train all parameters, add embedding and head to adapter.targets, "
                "or use a template with other tokens"
            )
    return notices


def _never_trained(weight_VD: Tensor, token: int) -> bool:
    row_D = weight_VD[token].float()
    size = row_D.abs().max()
    if size <= 1e-12:
        return True
    # The first few columns rule out nearly every row, so the whole matrix is never converted or compared.
    few = min(8, row_D.numel())
    near_V = (weight_VD[:, :few].float() - row_D[:few]).abs().amax(dim=1) <= 1e-4 * size
    near_V[token] = False
    rows = near_V.nonzero().flatten()
    return bool(rows.numel()) and bool(((weight_VD[rows].float() - row_D).abs().amax(dim=1) <= 1e-4 * size).any())
