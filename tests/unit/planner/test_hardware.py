"""Machines: pretend ones from text, and the free memory of this one through its cgroups."""

from __future__ import annotations

from pathlib import Path

import pytest

from finetune.errors import InputError
from finetune.planner import hardware
from finetune.planner.hardware import GIB, PRESETS, detect, host_free, own_bytes, parse


@pytest.mark.parametrize(
    ("text", "device", "gpus", "gpu", "host"),
    [
        ("1x24GB,64GB", "cuda", 1, 24 * 10**9, 64 * 10**9),
        ("8x80GiB", "cuda", 8, 80 * GIB, 1280 * GIB),
        ("2 x 40GB, 0.5TB", "cuda", 2, 40 * 10**9, 500 * 10**9),
        ("0,32GB", "cpu", 0, 0, 32 * 10**9),
        ("0x0GB,32GiB", "cpu", 0, 0, 32 * GIB),
        ("cpu", "cpu", 0, 0, 16 * GIB),
        ("rtx4090-24,128GiB", "cuda", 1, int(23.5 * GIB), 128 * GIB),
        ("8xh100-80", "cuda", 8, int(79.1 * GIB), 8 * 192 * GIB),
    ],
)
def test_pretend_machines(text: str, device: str, gpus: int, gpu: int, host: int) -> None:
    machine = parse(text)
    assert (machine.device, machine.gpus, machine.gpu_bytes, machine.host_bytes) == (device, gpus, gpu, host)
    assert machine.name


def test_presets_are_all_machines() -> None:
    assert list(PRESETS) == ["rtx4090-24", "a100-80", "h100-80", "h200-141", "cpu"]
    for name, machine in PRESETS.items():
        assert parse(name) == machine
        assert machine.host_bytes > 0
        assert (machine.gpu_bytes > 0) == (machine.device == "cuda")


@pytest.mark.parametrize(
    "text", ["", "24GB", "1x24", "h300", "1x24GB,64GB,3", "axb", "1x24GB,much", "-1x24GB", "0,0GB"]
)
def test_bad_text_is_refused_with_examples(text: str) -> None:
    with pytest.raises(InputError, match="1x24GB,64GB"):
        parse(text)


def host(root: Path, available: int, files: dict[str, str]) -> int:
    for path, content in {"proc/meminfo": f"MemTotal: 9 kB\nMemAvailable:   {available} kB\n", **files}.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(content)
    return host_free(root)


def test_host_memory_is_what_is_available(tmp_path: Path) -> None:
    assert host(tmp_path, 2048, {}) == 2048 * 1024


def test_cgroup_v2_limits_of_the_group_and_of_those_above(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/job/step\n",
        "sys/fs/cgroup/job/memory.max": "1000000\n",
        "sys/fs/cgroup/job/memory.current": "600000\n",
        "sys/fs/cgroup/job/memory.stat": "anon 1\ninactive_file 100000\n",
        "sys/fs/cgroup/job/step/memory.max": "max\n",
        "sys/fs/cgroup/job/step/memory.current": "5\n",
    }
    assert host(tmp_path, 10**6, files) == 1000000 - (600000 - 100000)


def test_cgroup_v2_in_a_container_where_only_the_root_is_seen(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/docker/abc\n",
        "sys/fs/cgroup/memory.max": "2000000\n",
        "sys/fs/cgroup/memory.current": "500000\n",
    }
    assert host(tmp_path, 10**6, files) == 1500000


def test_cgroup_v1_limit(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "5:cpu,memory:/box\n0::/\n",
        "sys/fs/cgroup/memory/box/memory.limit_in_bytes": "3000000\n",
        "sys/fs/cgroup/memory/box/memory.usage_in_bytes": "1000000\n",
        "sys/fs/cgroup/memory/box/memory.stat": "total_inactive_file 250000\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
    }
    assert host(tmp_path, 10**6, files) == 3000000 - 750000


def test_an_exhausted_group_has_nothing_left(tmp_path: Path) -> None:
    files = {"sys/fs/cgroup/memory.max": "100\n", "sys/fs/cgroup/memory.current": "300\n"}
    assert host(tmp_path, 10**6, files) == 0


def test_this_machine() -> None:
    machine = detect("cpu")
    assert machine.device == "cpu"
    assert machine.gpus == machine.gpu_bytes == 0
    assert machine.host_bytes > 100 * 2**20
    assert machine.cores >= 1
    import torch

    if not torch.cuda.is_available():
        assert detect("auto").device == "cpu"
        with pytest.raises(InputError, match="no GPU"):
            detect("cuda")


def test_what_this_process_holds_counts_as_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan counts the whole process, so memory that it holds already is not asked for twice; file pages are free."""
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/status").write_text("VmRSS:\t  900 kB\nRssAnon:\t     400 kB\nRssFile:\t     500 kB\n")
    assert own_bytes(tmp_path) == 400 * 1024
    assert own_bytes(tmp_path / "nowhere") == 0
    monkeypatch.setattr(hardware, "host_free", lambda: 10**9)
    monkeypatch.setattr(hardware, "own_bytes", lambda: 4 * 10**8)
    assert detect("cpu").host_bytes == 14 * 10**8


@pytest.mark.parametrize(
    "text",
    [f"1x{'9' * 400}GB", f"1x24GB,{'9' * 400}GB", f"{'9' * 5000}x24GB", "99999999999999999999x24GB", "1x9999999TB"],
)
def test_numbers_that_no_machine_has_are_refused(text: str) -> None:
    with pytest.raises(InputError, match="is not a machine"):
        parse(text)
