"""Tokens that a recipe adds to a model's vocabulary: into the tokenizer, and as rows of embedding and head.

A new row begins as the mean of the rows that the tokenizer had names for: the model then treats the token as an average
one, where a random row would be an outlier among trained ones (Hewitt 2021, "Initializing New Word Embeddings").
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from finetune.config.schema import ModelSection, Recipe
from finetune.environment import user_path
from finetune.errors import ModelError


def tokens_of(section: ModelSection) -> tuple[str, ...]:
    """The tokens that the recipe names and those of its file, each once, in that order. ModelError names a bad line."""
    found = dict.fromkeys(section.new_tokens)
    if section.new_tokens_path is not None:
        place = user_path(section.new_tokens_path, "model.new_tokens_path")
        found |= dict.fromkeys(_lines(place))
    return tuple(found)


def with_tokens(recipe: Recipe) -> Recipe:
    """The recipe with the tokens of model.new_tokens_path as model.new_tokens: a run stands on the tokens that were
    read, and not on a file that may change or go. ModelError names a bad line."""
    if recipe.model.new_tokens_path is None:
        return recipe
    told = {"new_tokens": tokens_of(recipe.model), "new_tokens_path": None}
    return recipe.model_copy(update={"model": recipe.model.model_copy(update=told)})


def _lines(place: Path) -> list[str]:
    where = "model.new_tokens_path"
    try:
        lines = [line.strip() for line in place.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise ModelError(
            f"{place} cannot be read: {reason}", where, "give a text file with one token a line"
        ) from error
    tokens = [line for line in lines if line]
    if not tokens:
        raise ModelError(f"{place} holds no token", where, "write one token a line, or leave it out")
    bad = next((token for token in tokens if token == "???" or "\0" in token), None)
    if bad is not None:
        raise ModelError(f"{bad!r} in {place} cannot be written in a recipe", where, "leave this token out")
    return tokens


def extend(tokenizer: Any, section: ModelSection) -> tuple[tuple[int, ...], list[str]]:
    """Adds the section's tokens; the ids of those that were not there before, and notices."""
    from tokenizers import AddedToken

    tokens = tokens_of(section)
    if not tokens:
        return (), []
    known = set(tokenizer.get_vocab())
    fresh = [token for token in tokens if token not in known]
    # Not normalized, so that it is found in a text exactly as it was written.
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in fresh])
    ids = tuple(tokenizer.convert_tokens_to_ids(fresh))
    notices = []
    if fresh:
        notices.append(f"{len(fresh)} tokens are added to the vocabulary (ids {min(ids)} to {max(ids)})")
    if len(fresh) < len(tokens):
        there = [token for token in tokens if token in known]
        notices.append(f"{len(there)} of model.new_tokens are in the vocabulary already (such as {there[0]!r})")
    return ids, notices


def give_rows(base: Any, ids: tuple[int, ...]) -> list[str]:
    """Rows for the tokens `ids` in embedding and head (one matrix where they are tied); returns notices.

    A model whose matrices have spare rows keeps its size. Every row below the first new id counts for the mean.
    """
    import torch

    if not ids:
        return []
    before = base.get_input_embeddings().weight.shape[0]
    if max(ids) >= before:
        # What it would draw for the new rows is replaced below.
        base.resize_token_embeddings(max(ids) + 1, mean_resizing=False)
    embedding, head = base.get_input_embeddings().weight, base.get_output_embeddings().weight
    with torch.no_grad():
        for weight_VD in (embedding,) if head is embedding else (embedding, head):
            weight_VD[list(ids)] = weight_VD[: min(ids)].mean(dim=0, dtype=torch.float32).to(weight_VD.dtype)
    sides = "embedding, which is the head too" if head is embedding else "embedding and head"
    after = embedding.shape[0]
    grown = f"grew from {before} to {after} rows" if after > before else f"had spare rows ({before})"
    return [f"the new tokens' rows are the mean of the others; {sides}: {grown}"]
