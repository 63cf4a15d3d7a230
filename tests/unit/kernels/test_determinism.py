"""The switch of deterministic algorithms is put back, also after an error."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from finetune.kernels.determinism import deterministic, repeatable


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


class _Seen(torch.autograd.Function):
    """Twice its input; notes how the switch stands, forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seen: list[tuple[bool, bool]]) -> torch.Tensor:
        ctx.seen = seen
        seen.append(_switch())
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.seen.append(_switch())
        return 2 * grad, None


def _switch() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


def test_a_repeatable_part_refuses_where_the_rest_of_the_step_warns() -> None:
    """Told only to warn, the kernels of attention are not deterministic."""
    seen: list[tuple[bool, bool]] = []
    x, y = torch.tensor([3.0], requires_grad=True), torch.tensor([5.0])
    with deterministic(True):
        out = repeatable(lambda x, y: _Seen.apply(x, seen) * y, x, y)
        assert _switch() == (True, True)
        (out * out).sum().backward()
        assert _switch() == (True, True)
    assert seen == [(True, False), (True, False)]
    assert out.item() == 30.0
    assert x.grad is not None
    assert x.grad.item() == 600.0
    assert _switch() == (False, False)


def test_without_gradients_a_repeatable_part_keeps_nothing() -> None:
    seen: list[tuple[bool, bool]] = []
    out = repeatable(lambda x: _Seen.apply(x, seen), torch.tensor([3.0]))
    assert (out.item(), out.requires_grad, seen) == (6.0, False, [(True, False)])
