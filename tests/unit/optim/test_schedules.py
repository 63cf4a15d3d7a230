"""Learning rates are functions of the step alone."""

import subprocess
import sys

import pytest

from finetune.config.schema import OptimizerSection, ScheduleSection, TrainSection
from finetune.errors import InputError
from finetune.optim.schedule import SCHEDULES, peak_rate, rate, rate_notices, schedule_notices, warmup_steps


def rates(steps: int, peak: float = 1.0, **section) -> list[float]:
    return [rate(ScheduleSection(**section), peak, step, steps) for step in range(steps)]


def test_b120_linear_rate_after_k_steps():
    assert rates(10, name="linear") == pytest.approx([1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1])


def test_b67_rates_after_a_resume_are_those_of_the_whole_run():
    section = ScheduleSection(name="linear", warmup=2)
    whole = rates(10, peak=3e-4, name="linear", warmup=2)
    resumed = [rate(section, 3e-4, step, 10) for step in range(5, 10)]
    assert resumed == whole[5:]
    assert resumed == sorted(resumed, reverse=True)


def test_warmup_rises_without_a_step_at_zero_and_meets_the_peak_once():
    assert rates(8, peak=4.0, name="linear", warmup=3) == pytest.approx([1.0, 2.0, 3.0, 4.0, 3.2, 2.4, 1.6, 0.8])


@pytest.mark.parametrize(
    ("warmup", "steps", "expected"),
    [(0, 10, 0), (0.03, 100, 3), (0.07, 100, 7), (0.1, 5, 1), (1, 10, 1), (5, 10, 5), (2.5, 10, 3), (50, 10, 10)],
)
def test_warmup_is_steps_or_a_share_below_one(warmup, steps, expected):
    assert warmup_steps(ScheduleSection(warmup=warmup), steps) == expected


def test_cosine_and_constant_values():
    assert rates(4, name="cosine") == pytest.approx([1.0, 0.8535533905932737, 0.5, 0.1464466094067262])
    assert rates(3, peak=2.0, name="constant", warmup=1) == [1.0, 2.0, 2.0]


@pytest.mark.parametrize("name", ["linear", "cosine", "wsd"])
def test_final_is_reached_one_step_after_the_last_and_kept(name):
    section = ScheduleSection(name=name, final=0.1)
    assert rate(section, 2.0, 0, 10) == pytest.approx(2.0)
    assert [rate(section, 2.0, step, 10) for step in (10, 11, 500)] == pytest.approx([0.2] * 3)


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_row_stays_between_zero_and_the_peak(name):
    for warmup in (0, 3, 0.5, 20):
        values = rates(20, peak=0.5, name=name, warmup=warmup)
        assert len(values) == 20
        assert all(0 < value <= 0.5 for value in values)


def test_table_has_the_promised_rows():
    assert list(SCHEDULES) == ["constant", "linear", "cosine", "wsd"]


def test_unknown_name_lists_the_known_ones():
    with pytest.raises(InputError, match="constant, linear, cosine"):
        rate(ScheduleSection(name="cosin"), 1.0, 0, 10)


def test_tables_import_no_torch():
    code = "import sys, finetune.optim.table, finetune.optim.schedule; print('torch' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "False"


def test_wsd_warms_up_stays_and_decays_by_a_straight_line():
    assert rates(10, name="wsd", warmup=2, decay=4) == pytest.approx([1 / 3, 2 / 3, 1, 1, 1, 1, 0.8, 0.6, 0.4, 0.2])
    assert rates(10, name="wsd", decay=0.2) == pytest.approx([1.0] * 8 + [2 / 3, 1 / 3])
    assert rates(10, name="wsd", decay=0.2, final=0.4)[-1] == pytest.approx(0.6)
    # A share that makes one step is one step of decay, not none.
    assert rates(10, name="wsd", decay=0.1) == pytest.approx([1.0] * 9 + [0.5])


def test_wsd_without_decay_is_constant_and_with_only_decay_linear():
    assert rates(5, name="wsd", decay=0) == [1.0] * 5
    assert rates(10, name="wsd", decay=50) == pytest.approx([(10 - step) / 11 for step in range(10)])


def test_what_does_not_fit_into_the_run_is_said():
    short = ScheduleSection(name="wsd", warmup=3, decay=4)
    assert schedule_notices(short, 20) == []
    assert "cut to those" in schedule_notices(short, 6)[0]
    assert "never reached" in schedule_notices(ScheduleSection(warmup=9), 4)[0]


@pytest.mark.parametrize(
    ("how", "batch", "expected"), [("none", 64, 1e-4), ("linear", 64, 4e-4), ("sqrt", 64, 2e-4), ("linear", 8, 5e-5)]
)
def test_rate_is_scaled_with_the_batch_on_request_and_said(how, batch, expected):
    section = OptimizerSection(lr=1e-4, scale_lr=how, base_batch=None if how == "none" else 16)
    for train in (TrainSection(batch=batch), TrainSection(batch_tokens=batch)):
        assert peak_rate(section, train) == pytest.approx(expected)
    said = rate_notices(section, TrainSection(batch=batch))
    assert said == [] if how == "none" else f"from a batch of 16 rows to {batch}" in said[0]
