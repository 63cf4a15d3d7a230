"""A machine's rates: rows of known machines, JSON, the cache, and what is measured on this CPU."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from finetune.machine.measuring import joined, measure
from finetune.machine.rates import ASSUMED, CPU, MIDDLE, OPTIONAL, REQUIRED, ROWS, from_dict, row_of
from finetune.machine.rates_cache import Machine, read, this_machine, write

HERE = Machine("NVIDIA H200", "570.1", "2.13.0", "some CPU", 16)


def test_rates_measured_on_this_cpu_are_sane() -> None:
    started = time.process_time()
    rates = measure(torch.device("cpu"), "this CPU")
    assert time.process_time() - started < 20
    assert (rates.source, rates.name, rates.gpus, rates.peer_access) == ("measured", "this CPU", 0, None)
    assert 1e9 < rates.fp32_operations_per_s < 1e13
    assert 1e8 < rates.bf16_operations_per_s < 1e14
    assert 1e9 < rates.memory_bytes_per_s < 2e12
    assert rates.host_copy_bytes_per_s == rates.up_bytes_per_s == rates.memory_bytes_per_s / 2
    assert 1e-7 < rates.launch_s < 1e-3
    assert 1e6 < rates.decode_weights_per_s < 1e12
    assert (rates.fp8_operations_per_s, rates.pin_bytes_per_s, rates.collective_bytes_per_s) == (None, None, None)
    assert from_dict(json.loads(json.dumps(rates.as_dict()))) == rates


def test_rows_of_known_machines() -> None:
    assert list(ROWS) == ["rtx4090-24", "a100-80", "h100-80", "h200-141", "cpu"]
    for name, row in ROWS.items():
        assert row.name == name
        assert from_dict(row.as_dict()) == row
    h200 = ROWS["h200-141"]
    assert h200.bf16_operations_per_s == pytest.approx(790e12, rel=0.01)
    assert h200.memory_bytes_per_s == pytest.approx(4.3e12, rel=0.01)
    assert h200.up_bytes_per_s == pytest.approx(55e9, rel=0.01)
    assert h200.both_bytes_per_s == pytest.approx(51e9, rel=0.01)
    speeds = [ROWS[name].bf16_operations_per_s for name in ("rtx4090-24", "a100-80", "h100-80")]
    assert speeds == sorted(speeds)
    assert ROWS["a100-80"].fp8_operations_per_s is None
    assert replace(ASSUMED["cuda"], name=MIDDLE) == ROWS[MIDDLE]
    assert "a middle one" in ASSUMED["cuda"].name
    assert ASSUMED["cpu"] == CPU
    assert (h200.operations_per_s(2), h200.operations_per_s(4)) == (
        h200.bf16_operations_per_s,
        h200.fp32_operations_per_s,
    )


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("NVIDIA H200", "h200-141"),
        ("NVIDIA H100 80GB HBM3", "h100-80"),
        ("NVIDIA A100-SXM4-80GB", "a100-80"),
        ("NVIDIA GeForce RTX 4090", "rtx4090-24"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GH200 480GB", None),
        ("NVIDIA H200 MIG 1g.18gb", None),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA A100-PCIE-40GB", None),
        ("Tesla T4", None),
    ],
)
def test_cards_are_known_by_their_drivers_name(name: str, row: str | None) -> None:
    assert row_of(name) == (ROWS[row] if row else None)


def test_the_cache_gives_back_what_was_kept(tmp_path: Path) -> None:
    rates = ROWS["h200-141"]
    folder = tmp_path / "rates"
    assert read(folder, HERE) == (None, "")
    path = write(folder, HERE, rates)
    assert read(folder, HERE) == (rates, "")
    # Written whole: nothing else is left beside it, and a second one takes its place.
    write(folder, HERE, replace(rates, launch_s=1e-5))
    assert [each.name for each in folder.iterdir()] == [path.name]
    found, _ = read(folder, HERE)
    assert found is not None
    assert found.launch_s == 1e-5


@pytest.mark.parametrize(
    "change", [{"gpu": "NVIDIA H100 80GB HBM3"}, {"driver": "580.2"}, {"torch": "2.14"}, {"cpu": "other"}, {"cores": 8}]
)
def test_rates_of_another_machine_are_not_this_ones(tmp_path: Path, change: dict[str, Any]) -> None:
    path = write(tmp_path, HERE, ROWS["h200-141"])
    other = replace(HERE, **change)
    assert read(tmp_path, other) == (None, "")
    # Even where the file has the other machine's name.
    path.rename(tmp_path / other.file)
    found, why = read(tmp_path, other)
    assert found is None
    assert "of another machine" in why


def test_an_old_or_damaged_file_is_not_used_and_why_is_said(tmp_path: Path) -> None:
    path = write(tmp_path, HERE, ROWS["h200-141"])
    whole = path.read_text()
    good = json.loads(whole)
    broken: list[tuple[str, str]] = [
        (whole[:100], "damaged"),
        ("", "damaged"),
        ("[1]", "damaged"),
        ("[" * 100_000, "damaged"),
        (json.dumps({**good, "form": 0}), "another version"),
        (json.dumps({**good, "rates": None}), "damaged"),
        (json.dumps({**good, "rates": {**good["rates"], "launch_s": -1.0}}), "launch_s is -1.0"),
        (json.dumps({**good, "rates": {**good["rates"], "launch_s": True}}), "launch_s is True"),
        (json.dumps({**good, "rates": {**good["rates"], "up_bytes_per_s": float("nan")}}), "up_bytes_per_s is nan"),
        (json.dumps({**good, "rates": {**good["rates"], "more": 1}}), "other fields: more"),
        (json.dumps({**good, "rates": {**good["rates"], "gpus": "two"}}), "gpus: of another kind"),
    ]
    for text, words in broken:
        path.write_text(text)
        found, why = read(tmp_path, HERE)
        assert found is None
        assert words in why, text[:80]
        assert str(path) in why
    path.write_bytes(b"\xff\xfe\x00")
    assert "cannot be read" in read(tmp_path, HERE)[1]


def test_every_number_of_rates_is_checked() -> None:
    assert REQUIRED | OPTIONAL | {"name", "source", "gpus", "peer_access", "topology"} == set(CPU.as_dict())
    for name in REQUIRED:
        with pytest.raises(ValueError, match=name):
            from_dict({**CPU.as_dict(), name: None})
    assert from_dict({**CPU.as_dict(), **dict.fromkeys(OPTIONAL)}) is not None


def test_a_machine_is_its_parts(tmp_path: Path) -> None:
    (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
    (tmp_path / "proc/driver/nvidia/version").write_text("NVRM version: NVIDIA UNIX Module  570.124.06  Wed\nGCC 13\n")
    (tmp_path / "proc/cpuinfo").write_text("processor : 0\nmodel name\t: AMD EPYC 9554\nflags: x\n")
    machine = this_machine("NVIDIA H200", 16, tmp_path)
    assert (machine.gpu, machine.driver, machine.cpu, machine.cores) == (
        "NVIDIA H200",
        "570.124.06",
        "AMD EPYC 9554",
        16,
    )
    assert machine.torch.split("+")[0] == torch.__version__.split("+")[0]
    assert this_machine("", 16, tmp_path).driver == ""
    assert machine.file.startswith("nvidia-h200-")
    assert machine.file != replace(machine, cores=8).file


def test_how_gpus_are_joined_is_read_from_the_drivers_table() -> None:
    table = (
        "\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\x1b[0m\nGPU0\t X \tNV18\tSYS\tPIX\t0-47\n"
        "GPU1\tNV18\t X \tSYS\tSYS\t0-47\n"
    )
    assert joined(table, 3) == "NV18, SYS"
    assert joined("nothing", 2) == ""


@pytest.mark.parametrize("value", [10**400, 1e30, 1e-300, 5e-324])
def test_rates_that_seconds_cannot_be_made_with_are_refused(value: float) -> None:
    """A whole number too large for a float is one of them: JSON has such."""
    with pytest.raises(ValueError, match="fp32_operations_per_s"):
        from_dict({**CPU.as_dict(), "fp32_operations_per_s": value})


def test_decoding_that_cannot_be_measured_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    from bitsandbytes import functional

    def none(*given: object, **named: object) -> None:
        raise NotImplementedError("no kernel")

    monkeypatch.setattr(functional, "dequantize_4bit", none)
    rates = measure(torch.device("cpu"), "this CPU")
    assert "bitsandbytes cannot here" in rates.source
    assert 0 < rates.decode_weights_per_s < rates.memory_bytes_per_s
