"""One plan of one recipe as the levers' cost models see it, and the machine's rates that they share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from finetune.contracts import Plan, Shape
from finetune.machine.rates import ASSUMED, Rates
from finetune.memory.storage import Storage, Work, trained_tensors

PRODUCTS = 0.87
"""What a step's matrix products reach of the rate of large ones alone, clocks under a long load included. From the lines of
resident plans in benchmarks/results/frontier.jsonl (one H200), once what memory moves is taken off."""


UpdateBytes = Callable[[int, str], int]


@dataclass(frozen=True)
class TrainedTensors:
    """`count` trained tensors alike: elements and role of each, and bytes of optimizer state of each."""

    count: int
    elements: int
    state: int
    role: str = ""


@dataclass(frozen=True)
class Sums:
    """What seconds read of a shape, summed once: operations a token of the blocks' linears, of these as they are run again,
    the linears' widths in and out, and those of the adapted ones."""

    linears: float
    again: float
    widths: int
    adapted: int


@dataclass(frozen=True)
class Case:
    """What a cost model may ask for; `case_of` makes one.

    `tensors` are the trained ones; `rows` are those of one rank's share of a step; `update_bytes` the temporaries of one
    tensor's update, by its elements and the device's type (None: those of torch's AdamW). `rates` are the machine's (None:
    assumed ones of such a device); `filled`: how long rows are with their padding, as a share of `length`; `sums`: as memory/step_time makes them (None: at each use).
    """

    shape: Shape
    storage: Storage
    plan: Plan
    length: int
    rows: int
    tensors: tuple[TrainedTensors, ...]
    update_bytes: UpdateBytes | None = None
    rates: Rates | None = None
    filled: float = 1.0
    sums: Sums | None = None

    @property
    def speed(self) -> Rates:
        """The machine's rates, or those of one of its kind."""
        return self.rates or ASSUMED[self.storage.device]

    @property
    def work(self) -> Work:
        """One micro-batch."""
        return Work(self.plan.micro_batch, self.length, self.plan.mlp_tile)

    @property
    def gradients(self) -> int:
        """Bytes of the gradients of every trained tensor."""
        return sum(self.storage.weight * each.count * each.elements for each in self.tensors)

    @property
    def state(self) -> int:
        """Bytes of the optimizer's state."""
        return sum(each.count * each.state for each in self.tensors)

    @property
    def largest(self) -> int:
        """Elements of the largest trained tensor."""
        return max((each.elements for each in self.tensors), default=0)

    @property
    def step_rows(self) -> int:
        return max(self.rows, self.plan.micro_batch)

    @property
    def step_tokens(self) -> int:
        return self.step_rows * self.length


def case_of(
    shape: Shape, storage: Storage, plan: Plan, length: int, rows: int, state_bytes: Callable[[int, str], int]
) -> Case:
    """The case of a plan. `state_bytes` is the optimizer row's: bytes of one tensor's state, by its elements and its role."""
    alike = Counter(trained_tensors(shape, storage))
    tensors = tuple(
        TrainedTensors(count, elements, state_bytes(elements, role), role) for (elements, role), count in alike.items()
    )
    return Case(shape, storage, plan, length, rows, tensors)


def link_seconds(case: Case, moved: int) -> float:
    """Seconds that so many bytes take between host and device one way, while the other way is busy too."""
    return moved / case.speed.both_bytes_per_s


def both_ways_seconds(case: Case, up: int, down: int) -> float:
    """Seconds that bytes up and bytes down take side by side: together at first, what is left of one alone."""
    together, speed = min(up, down), case.speed
    alone = (up - together) / speed.up_bytes_per_s + (down - together) / speed.down_bytes_per_s
    return together / speed.both_bytes_per_s + alone


def compute_seconds(case: Case, operations: float) -> float:
    """Seconds of matrix products in the compute type."""
    return operations / (PRODUCTS * case.speed.operations_per_s(case.storage.compute))


def memory_seconds(case: Case, moved: float) -> float:
    """Seconds that operations take which only read and write so many bytes of the device's memory."""
    return moved / case.speed.memory_bytes_per_s
