"""A template's own chat template, given to a tokenizer: rows, generation and the saved files then use the same one.

It is set on the tokenizer itself (its documented `chat_template`), so whatever saves the tokenizer saves the template with
it, and whatever looks for the tokens that end a turn finds those that were trained.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from finetune.config.schema import DataSection
from finetune.data.templates import Template, load_template
from finetune.errors import DataError


def adopt(template: Template, tokenizer: Any) -> list[str]:
    """Gives the tokenizer the template's chat template, if it brings one; returns what to tell the user.

    DataError when the tokenizer lacks a token that the chat template writes: its text would fall apart into letters, and
    no single token would end a turn.
    """
    if not template.chat_template:
        return []
    known = tokenizer.get_vocab()
    lacking = [token for token in template.tokens if token not in known]
    name = getattr(tokenizer, "name_or_path", "") or "the model"
    if not lacking and "eos_token" in template.chat_template and not tokenizer.eos_token:
        lacking = ["eos_token"]
    if lacking:
        what = f"the tokenizer of {name} has no token {', '.join(lacking)}, which this template writes"
        remedy = (
            "use a template whose tokens the model has (finetune templates), or one without: alpaca, completion, text"
        )
        raise DataError(what, where=f"data.template={template.name}", remedy=remedy)
    before = tokenizer.chat_template
    tokenizer.chat_template = template.chat_template
    if before and before != template.chat_template:
        return [f"data.template={template.name} is used in the place of the chat template of {name}, and saved with it"]
    return []


def prepare_tokenizer(tokenizer: Any, data: DataSection, tell: Callable[[str], None] | None = None) -> Any:
    """The tokenizer as rows of `data` are written with it; `tell` is given a line where that changed its chat template."""
    for notice in adopt(load_template(data.template), tokenizer):
        if tell is not None:
            tell(notice)
    return tokenizer
