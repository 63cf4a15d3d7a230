"""The rates that a run is planned with: the machine's for a new run, the run's own where it goes on.

They stand in the run folder's plan.yaml. A run that goes on on the same kind of machine is planned with those, so that a
measurement made meanwhile, a little different, does not change its plan (and so its bits). Rank 0 reads or measures them;
all ranks have the same.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from finetune.machine.collectives import World
from finetune.machine.rates import Rates, from_dict
from finetune.planner.hardware import Hardware, detect
from finetune.planner.machine_rates import with_rates
from finetune.telemetry.log import Log

PLAN = "plan.yaml"


def hardware_of(world: World, checkpoint: Path | None, log: Log) -> Hardware:
    """This rank's machine with the rates that the run is planned with; `checkpoint`: the one the run goes on from."""
    hardware = detect(world.device.type)

    def choose() -> Rates | None:
        own = _of_run(checkpoint.parent.parent, hardware, log) if checkpoint is not None else None
        return own or with_rates(hardware, log.notice, measures=True).rates

    return replace(hardware, rates=world.agree(choose))


def stored(rates: Rates, machine: str) -> dict[str, Any]:
    """What plan.yaml says of the rates."""
    return {"machine": machine, "rates": rates.as_dict()}


def _of_run(folder: Path, hardware: Hardware, log: Log) -> Rates | None:
    """The rates in the run's plan; None, with a notice where there should be some that serve."""
    import yaml

    try:
        found = yaml.safe_load((folder / PLAN).read_text(encoding="utf-8"))
        if not isinstance(found, dict) or "rates" not in found:
            # A run of an earlier version.
            return None
        if found.get("machine") != hardware.name:
            log.notice(
                f"the run was planned for {found.get('machine')}; this is {hardware.name}, whose rates are taken"
            )
            return None
        return from_dict(found["rates"])
    except (OSError, ValueError, yaml.YAMLError) as error:
        log.notice(f"the run's rates cannot be read from {folder / PLAN} ({error}): this machine's are taken")
        return None
