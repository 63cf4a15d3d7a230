"""Peaks by phase: a phase within another counts for itself alone, and what came before it is not forgotten."""

from __future__ import annotations

import torch

from finetune.telemetry.memory import Peaks


class Counter:
    """A device's peak counter: the most of what was set since the last reset, as torch keeps it."""

    def __init__(self) -> None:
        self.held = self.most = 0

    def hold(self, count: int) -> None:
        self.held, self.most = count, max(self.most, count)

    def peak(self, device: torch.device) -> int:
        return self.most

    def reset(self, device: torch.device) -> None:
        self.most = self.held


def test_each_phase_has_its_own_peak() -> None:
    counter = Counter()
    peaks = Peaks(torch.device("cpu"), counter.peak, counter.reset)
    counter.hold(70)
    counter.hold(20)
    peaks.enter("step")
    counter.hold(50)
    counter.hold(20)
    with peaks.during("evaluate"):
        counter.hold(60)
        counter.hold(20)
    counter.hold(40)
    counter.hold(20)
    assert peaks.of("step") == 50
    with peaks.during("evaluate"):
        counter.hold(30)
        counter.hold(20)
    assert peaks.all == {"load": 70, "step": 50, "evaluate": 60}
    assert peaks.of("save") == 0


def test_a_phase_that_fails_counts_too() -> None:
    counter = Counter()
    peaks = Peaks(torch.device("cpu"), counter.peak, counter.reset)
    peaks.enter("step")
    try:
        with peaks.during("save"):
            counter.hold(9)
            counter.hold(1)
            raise KeyError
    except KeyError:
        pass
    assert (peaks.phase, peaks.of("save"), peaks.of("step")) == ("step", 9, 1)


def test_on_a_cpu_nothing_is_counted() -> None:
    peaks = Peaks()
    with peaks.during("evaluate"):
        torch.ones(1000)
    assert (peaks.all, peaks.reserved) == ({}, 0)
