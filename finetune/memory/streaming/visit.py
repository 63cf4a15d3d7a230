"""A tall matrix on the host that is whole on the device for one phase of a step, and gone before the next begins.

In that phase a head computes as one that lives on the device: the same operations in the same order, so the same bits. A
frozen matrix is asked for while the phase before still computes, and comes in one copy behind what its lane brings by then. A
trained one has a pending update, which is made part by part on the way, as for any matrix that passes (memory/streaming/tall);
its gradient goes down whole when the phase is over.

Legend: V rows (words), D width.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from finetune.memory.streaming.lanes import Lane, mark, wait
from finetune.memory.streaming.tall import Tall


class Visit:
    """The visits of `tall`'s matrix. `up`: the lane that a frozen one comes by, after what is queued there."""

    def __init__(self, tall: Tall, up: Lane) -> None:
        self.tall = tall
        self.trained = tall.updates is not None
        self._up = up
        self._coming: tuple[Tensor, Any] | None = None
        self._leaving: tuple[Tensor, Any] | None = None

    def ask(self) -> None:
        """Starts to bring a frozen matrix up once the computation has come this far. A trained one waits for its phase: its
        memory would stand beside that of the blocks' updates."""
        if self.trained or self._coming is not None:
            return
        whole_VD = self._room()
        # The memory may have had another use before, which the lane does not know of.
        self._coming = whole_VD, self._up.copy(whole_VD, self.tall.weight_VD, [mark(self.tall.device)])

    @contextmanager
    def there(self) -> Iterator[None]:
        """Inside, the parameter is bound to the device; at the end its gradient, if it is trained, is on its way down."""
        parameter = self.tall.parameter
        parameter.data = self._updated() if self.trained else self._asked()
        try:
            yield
            if self.trained:
                gradient_VD = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.contiguous()
                self._leaving = gradient_VD, self.tall.lower_whole(gradient_VD)
        finally:
            parameter.grad = None
            parameter.data = self.tall.weight_VD

    def let_go(self) -> None:
        """Frees a gradient that was on its way down, once the computation waits for its end."""
        if self._leaving is not None:
            wait(self.tall.device, self._leaving[1])
            self._leaving = None

    def end(self) -> None:
        """The step is over, or broke off: nothing of it stays on the device."""
        self.let_go()
        if self._coming is not None:
            wait(self.tall.device, self._coming[1])
            self._coming = None

    def _asked(self) -> Tensor:
        self.ask()
        assert self._coming is not None
        (whole_VD, ready), self._coming = self._coming, None
        wait(self.tall.device, ready)
        return whole_VD

    @torch.no_grad()
    def _updated(self) -> Tensor:
        whole_VD = self._room()
        for rows, weight_RD in self.tall.passing():
            whole_VD[rows] = weight_RD
        return whole_VD

    def _room(self) -> Tensor:
        return torch.empty(self.tall.weight_VD.shape, dtype=self.tall.weight_VD.dtype, device=self.tall.device)
