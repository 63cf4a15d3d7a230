"""Rates measured on a GPU: within sane bounds, quickly, with nothing left on the device."""

from __future__ import annotations

import time

import pytest
import torch

from finetune.machine.measuring import measure
from finetune.machine.rates import from_dict, row_of

pytestmark = pytest.mark.gpu


def test_a_gpus_rates_are_measured_in_under_twenty_seconds() -> None:
    device = torch.device("cuda", 0)
    name = torch.cuda.get_device_name(device)
    before = torch.cuda.memory_allocated(device)
    started = time.perf_counter()
    rates = measure(device, name)
    assert time.perf_counter() - started < 20
    # cuBLAS keeps its workspace, which torch counts as allocated.
    assert torch.cuda.memory_allocated(device) <= before + 2**26
    assert from_dict(rates.as_dict()) == rates
    assert rates.gpus == torch.cuda.device_count()
    assert rates.fp32_operations_per_s < rates.bf16_operations_per_s
    assert 0.5 * rates.up_bytes_per_s < rates.both_bytes_per_s <= 1.1 * rates.up_bytes_per_s
    assert 5e8 < (rates.pin_bytes_per_s or 0) < 1e12
    assert 1e-6 < rates.launch_s < 1e-4
    if torch.cuda.get_device_capability(device) >= (8, 9):
        assert (rates.fp8_operations_per_s or 0) > rates.bf16_operations_per_s
    row = row_of(name)
    if row is not None:
        for field in ("bf16_operations_per_s", "memory_bytes_per_s", "up_bytes_per_s", "down_bytes_per_s"):
            assert getattr(rates, field) == pytest.approx(getattr(row, field), rel=0.3), field
        assert rates.decode_weights_per_s == pytest.approx(row.decode_weights_per_s, rel=1.0)
