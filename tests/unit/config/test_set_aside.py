"""What the command line sets aside of a recipe's own settings, and that it says so."""

from __future__ import annotations

import pytest

from finetune.config.load import load_recipe, notes_of_words
from finetune.errors import ConfigError


def test_no_adapter_on_the_command_line_sets_the_recipes_own_aside_and_says_so() -> None:
    words = ["adapter.kind=none"]
    recipe = load_recipe("quickstart", words)
    assert recipe.adapter.kind == "none"
    assert recipe.adapter.rank == 16
    assert notes_of_words("quickstart", words) == [
        "adapter.kind=none: the recipe's own adapter.rank, adapter.alpha, adapter.targets are set aside"
    ]
    with pytest.raises(ConfigError, match=r"adapter\.rank is 4, and adapter\.kind is none"):
        load_recipe("quickstart", [*words, "adapter.rank=4"])
