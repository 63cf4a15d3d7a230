"""Counts bytes of tensors: those that autograd saves, and those that live at the widest moment of a step."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class LiveBytes(TorchDispatchMode):
    """Bytes of storages made inside the context: `now`, and at their `peak`. What stood before is not counted."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.peak = 0
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for value in tree_iter((args, kwargs)):
            if isinstance(value, Tensor):
                self._sizes.setdefault(value.untyped_storage()._cdata, 0)
        out = function(*args, **(kwargs or {}))
        for value in tree_iter(out):
            if isinstance(value, Tensor):
                self._count(value.untyped_storage())
        self.peak = max(self.peak, self.now)
        return out

    def _count(self, storage: Any) -> None:
        key = storage._cdata
        if key not in self._sizes and storage.nbytes():
            self._sizes[key] = storage.nbytes()
            self.now += storage.nbytes()
            weakref.finalize(storage, self._gone, key)

    def _gone(self, key: int) -> None:
        self.now -= self._sizes.pop(key, 0)


@contextmanager
def saved_bytes(model: nn.Module) -> Iterator[dict[int, int]]:
    """Bytes that autograd saves inside the context, by storage; weights and buffers are not counted."""
    own = {tensor.untyped_storage().data_ptr() for tensor in [*model.parameters(), *model.buffers()]}
    seen: dict[int, int] = {}
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            seen[storage.data_ptr()] = storage.nbytes()
            kept.append(tensor)  # so that no address is used twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        yield seen
