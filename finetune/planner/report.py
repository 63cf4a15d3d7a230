"""The plan as a table for people and as a dict for programs.

The table says what was chosen, where the bytes go, what each lever saved and cost, what the next faster plan lacks and
what the smallest needs. The dict has the keys that `plan --json` promises.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from typing import TYPE_CHECKING, Any, TypeVar

from finetune.config.schema import Recipe
from finetune.contracts import Bytes, Plan, Shape
from finetune.machine.rates import Rates
from finetune.memory import weight_streaming
from finetune.memory.case import Case, case_of
from finetune.memory.storage import storage_of
from finetune.memory.table import LEVERS
from finetune.planner.hardware import Hardware
from finetune.planner.pins import Allowance, why_off
from finetune.planner.plan import Decision
from finetune.planner.refusal import PlanRefusedError
from finetune.planner.space import Candidate
from finetune.planner.words import size

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

BAR = 30
"""Characters of the longest bar."""
One = TypeVar("One")
LINE = 8
"""Plans shown of those that no other beats."""


def render(decision: Decision, shape: Shape, recipe: Recipe, hardware: Hardware) -> RenderableType:
    """The plan's table; print it with rich."""
    from rich.console import Group
    from rich.padding import Padding

    parts: list[RenderableType] = [
        _headline(decision, shape, recipe, hardware),
        _choices(decision),
        _bars(decision),
        _phases(decision),
        _levers(decision, shape, recipe),
        _neighbours(decision),
    ]
    notes = "\n".join(f"- {reason}" for reason in decision.reasons)
    return Group(*(Padding(part, (0, 0, 1, 0)) for part in parts), notes)


def _headline(decision: Decision, shape: Shape, recipe: Recipe, hardware: Hardware) -> RenderableType:
    from rich.text import Text

    partial = recipe.train.last_blocks or recipe.train.modules or recipe.train.freeze
    own = "a part of its parameters" if partial else "every parameter"
    method = own if recipe.adapter.kind == "none" else f"{recipe.adapter.kind} rank {recipe.adapter.rank}"
    base = "" if recipe.model.base == "same" else f", frozen weights in {recipe.model.base}"
    memory = f"{hardware.gpus} x {size(hardware.gpu_bytes)} GPU, " if hardware.gpus else ""
    return Text(
        f"{shape.name}: {shape.parameters / 1e6:,.1f} M parameters, trains {method}{base}, {decision.precision}\n"
        f"on {hardware.name}: {memory}{size(hardware.host_bytes)} host memory free, {hardware.cores} cores\n"
        f"seconds by {rates_in_words(decision.rates)}"
    )


def rates_in_words(rates: Rates) -> str:
    """Whose rates a plan's seconds come from."""
    return {
        "measured": f"the rates measured on this machine ({rates.name})",
        "assumed": "the rates assumed of any CPU (`finetune bench` measures this machine's)",
    }.get(rates.source, f"the {rates.source} of {rates.name}")


def _table(title: str, *columns: str) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right", no_wrap=True)
    return table


def _choices(decision: Decision) -> Table:
    table = _table("Plan", "choice", "value")
    for name, value in plan_dict(decision.plan).items():
        table.add_row(name, str(value).lower() if isinstance(value, bool) else str(value))
    table.add_row("rows a step, a process", str(decision.facts.rows))
    table.add_row("tokens a row, at most", str(decision.facts.longest_row))
    return table


def _bars(decision: Decision) -> Table:
    """The step's bytes by cause, largest first."""
    step = decision.estimate.phases["step"]
    table = _table(f"Bytes of a step at its widest: {size(step.total)}", "cause", "bytes", "share", "")
    table.columns[-1].justify = "left"
    widest = max(step.causes.values(), default=1) or 1
    for cause, count in sorted(step.causes.items(), key=lambda pair: -pair[1]):
        if count:
            table.add_row(cause, size(count), f"{count / step.total:.0%}", "█" * max(1, round(BAR * count / widest)))
    return table


def _phases(decision: Decision) -> Table:
    budget = decision.budget
    where = "host memory" if budget.device == "cpu" else "GPU memory"
    table = _table(f"Phases ({where}; budget {size(budget.device_bytes)} a process)", "phase", "bytes", "of the budget")
    for name, phase in decision.estimate.phases.items():
        table.add_row(name, size(phase.total), f"{phase.total / budget.device_bytes:.0%}")
    if budget.device != "cpu":
        host = decision.estimate.host.total * budget.processes
        table.add_row("host, all processes", size(host), f"{host / budget.host_bytes:.0%} of {size(budget.host_bytes)}")
    return table


def _levers(decision: Decision, shape: Shape, recipe: Recipe) -> Table:
    facts = decision.facts
    storage = storage_of(shape, recipe, facts.precision, decision.plan.device)
    case = case_of(shape, storage, decision.plan, facts.longest_row, facts.rows, facts.state_bytes)
    case = replace(case, rates=decision.rates)
    allowance = Allowance(recipe, shape, storage, facts.precision, decision.plan.ranks)
    table = _table("Levers", "lever", "value", "saves", "costs", "exactness", "what it does")
    table.columns[-1].justify, table.columns[-1].no_wrap = "left", False
    if decision.plan.weights == "streamed":
        _streamed_row(table, case)
    for lever in LEVERS.values():
        value = getattr(decision.plan, lever.field)
        on = value != lever.off
        reason = "" if on else why_off(lever, allowance)
        if reason:
            table.add_row(lever.name, "off", "", "", lever.exact, reason)
            continue
        shown = case if on else replace(case, plan=replace(case.plan, **{lever.field: lever.choices[-1]}))
        saved, cost = lever.saves(shown), lever.slowdown(shown)
        verb = "" if on else "would: "
        label = {True: "on", False: "off"}.get(value, str(value)) if on else "off"
        bytes_saved = size(saved) if saved > 0 else "nothing"
        table.add_row(lever.name, label, verb + bytes_saved, f"{verb}{cost:.0%}", lever.exact, lever.note)
    return table


def _streamed_row(table: Table, case: Case) -> None:
    """What streaming saves and costs, beside the levers."""
    plan, figures = case.plan, weight_streaming.streaming_of(case)
    moved = weight_streaming.ends_of(case)
    kept = case.shape.blocks * (figures.block + figures.gradients + figures.state) - weight_streaming.slots_bytes(case)
    saved = kept + moved.weights + moved.gradients + moved.state
    exact = "reordered sums" if moved.head_passes else "bitwise"
    note = f"blocks live on the host and take turns in {plan.slots} buffers; {plan.resident_blocks} stay"
    table.add_row(
        "streamed weights", "on", size(saved), f"{max(0.0, weight_streaming.slowdown(case)):.0%}", exact, note
    )


def _neighbours(decision: Decision) -> Table:
    table = _table("Other plans", "plan", "micro-batch", "levers", "bytes", "s/step", "tokens/s", "time", "lacks")
    table.columns[2].justify, table.columns[2].no_wrap = "left", False
    chosen = Candidate(decision.plan, decision.estimate, decision.seconds)
    rows = [("smallest", decision.smallest), ("chosen", chosen)]
    if decision.next_faster:
        rows.append(("next faster", decision.next_faster))
    told = {plan_key(each.plan) for _, each in rows}
    line = [each for each in line_of(decision.alternatives) if plan_key(each.plan) not in told]
    rows = sorted([*rows, *(("", each) for each in line)], key=lambda row: (row[1].bytes, -row[1].seconds))
    for name, each in rows:
        plan = each.plan
        table.add_row(
            name,
            str(plan.micro_batch),
            _on(plan),
            size(each.bytes),
            f"{each.seconds:.3g}",
            f"{decision.step_tokens / each.seconds:,.0f}",
            f"{each.relative_seconds:.2f}x",
            size(lacks) if (lacks := decision.budget.lack(each.estimate)) > 0 else "",
        )
    return table


def line_of(alternatives: Sequence[One], most: int = LINE) -> list[One]:
    """At most `most` of the plans that no other beats, evenly chosen, the first and the last among them."""
    if len(alternatives) <= most:
        return list(alternatives)
    return [alternatives[round(at * (len(alternatives) - 1) / (most - 1))] for at in range(most)]


def plan_key(plan: Plan) -> str:
    """Equal for plans that differ in their reasons alone."""
    return repr(plan_dict(plan))


def _on(plan: Plan) -> str:
    """The levers that a plan has on, by their keys."""
    on = {
        lever.field: getattr(plan, lever.field) for lever in LEVERS.values() if getattr(plan, lever.field) != lever.off
    }
    if plan.weights == "streamed":
        on = {
            "weights": "streamed",
            "resident_blocks": plan.resident_blocks,
            "head_placement": plan.head_placement,
            **on,
        }
    return ", ".join(field if value is True else f"{field}={value}" for field, value in on.items()) or "none"


def plan_dict(plan: Plan) -> dict[str, Any]:
    """Every choice of a plan, without its reasons."""
    return {field.name: getattr(plan, field.name) for field in fields(plan) if field.name != "reasons"}


def _causes(bytes_: Bytes) -> dict[str, int]:
    return {**{name: count for name, count in bytes_.causes.items() if count}, "total": bytes_.total}


def _memory(plan: Plan, phases: dict[str, Bytes], host: Bytes) -> dict[str, Any]:
    by_phase = {name: _causes(phase) for name, phase in phases.items()}
    if plan.device == "cpu":
        return {"gpu_bytes": {}, "host_bytes": by_phase}
    return {"gpu_bytes": by_phase, "host_bytes": {"process": _causes(host)}}


def _times(seconds: float, step_tokens: float) -> dict[str, float]:
    """Seconds of a step and tokens a second of all ranks, padding not counted."""
    return {"seconds_per_step": float(f"{seconds:.4g}"), "tokens_per_s": float(f"{step_tokens / seconds:.4g}")}


def _candidate(each: Candidate, step_tokens: float) -> dict[str, Any]:
    return {
        "plan": plan_dict(each.plan),
        "bytes": each.bytes,
        **_times(each.seconds, step_tokens),
        "relative_seconds": round(each.relative_seconds, 4),
    }


def as_dict(decision: Decision, shape: Shape, recipe: Recipe, hardware: Hardware) -> dict[str, Any]:
    """The promised keys of `plan --json`, and some more.

    `gpu_bytes` and `host_bytes`: {phase: {cause: bytes, "total": bytes}} of one process; on a CPU the former is empty,
    on a GPU the latter has one entry, `process`. `seconds_per_step` and `tokens_per_s` are predicted from the hardware's
    rates, of all ranks and without padding. `alternatives` are beaten by no plan in both bytes and time, smallest first; times are relative to the chosen
    plan's.
    """
    faster, tokens = decision.next_faster, decision.step_tokens
    next_faster = {**_candidate(faster, tokens), "lacks": decision.lacks} if faster else None
    return {
        "fits": True,
        "plan": plan_dict(decision.plan),
        **_memory(decision.plan, decision.estimate.phases, decision.estimate.host),
        **_times(decision.seconds, decision.step_tokens),
        "smallest": _candidate(decision.smallest, decision.step_tokens),
        "next_faster": next_faster,
        "alternatives": [_candidate(each, decision.step_tokens) for each in decision.alternatives],
        "reasons": list(decision.reasons),
        "budget": {"device_bytes": decision.budget.device_bytes, "host_bytes": decision.budget.host_bytes},
        "precision": decision.precision,
        "model": {"name": shape.name, "parameters": shape.parameters},
        "recipe": recipe.recipe,
        "hardware": {**asdict(hardware), "rates": decision.rates.as_dict()},
    }


def refused_as_dict(error: PlanRefusedError) -> dict[str, Any]:
    """The same keys when nothing fits: `plan` is null, bytes are the smallest plan's, `changes` the ways out."""
    return {
        "fits": False,
        "plan": None,
        **_memory(error.smallest, error.estimate.phases, error.estimate.host),
        "seconds_per_step": None,
        "tokens_per_s": None,
        "smallest": {"plan": plan_dict(error.smallest), "bytes": error.estimate.peak, "lacks": error.gap},
        "alternatives": [],
        "reasons": [error.fault.what],
        "changes": [
            {"keys": list(change.keys), "bytes": change.bytes, "fits": change.fits, "note": change.note}
            for change in error.changes
        ],
    }
