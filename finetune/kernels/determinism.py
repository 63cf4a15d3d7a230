"""Torch's deterministic algorithms for a while: the same bits again from the same input, at some cost.

Attention's backward adds up with atomics otherwise, in whatever order threads arrive. The switch is one of the process,
so it is put back; only backward and forward of a step run under it.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def deterministic(on: bool) -> Iterator[None]:
    """A block in which torch takes deterministic algorithms where it has them (`on` false: changes nothing)."""
    if not on:
        yield
        return
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    fills = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    # It would write every new tensor once more, to show reads of memory that was never written.
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        with warnings.catch_warnings():
            # cuBLAS asks for a workspace of fixed size, which only several streams at once would need.
            warnings.filterwarnings("ignore", message=".*CUBLAS_WORKSPACE_CONFIG.*")
            yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.utils.deterministic.fill_uninitialized_memory = fills
