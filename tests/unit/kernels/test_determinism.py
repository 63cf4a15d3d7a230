"""The switch of deterministic algorithms is put back, also after an error."""

from __future__ import annotations

import pytest
import torch

from finetune.kernels.determinism import deterministic


def _fail_inside() -> None:
    with deterministic(True):
        assert torch.are_deterministic_algorithms_enabled()
        raise KeyError


@pytest.mark.parametrize("before", [False, True])
def test_the_switch_is_put_back(before: bool) -> None:
    torch.use_deterministic_algorithms(before)
    try:
        with pytest.raises(KeyError):
            _fail_inside()
        assert torch.are_deterministic_algorithms_enabled() is before
        assert torch.utils.deterministic.fill_uninitialized_memory is True
    finally:
        torch.use_deterministic_algorithms(False)


def test_off_changes_nothing() -> None:
    with deterministic(False):
        assert not torch.are_deterministic_algorithms_enabled()
