"""The timeline of a step: a trace's events become rows by what each lane's mark says, and a picture is drawn of them."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.benchmarks.conftest import SCRIPTS

COMPUTE, UP, DOWN, KEPT_UP, KEPT_DOWN, DATA = 7, 20, 24, 28, 32, 36


def event(kind: str, name: str, stream: int, start: float, length: float, octets: int = 0) -> dict[str, Any]:
    """An event on a GPU as Kineto writes it; microseconds."""
    arguments: dict[str, Any] = {"device": 0, "context": 1, "stream": stream, "correlation": 5}
    if octets:
        arguments |= {"bytes": octets, "memory bandwidth (GB/s)": octets / length / 1e3 if length else "N/A"}
    return {
        "ph": "X", "cat": kind, "name": name, "pid": 0, "tid": stream, "ts": 1e9 + start, "dur": length, "args": arguments,
    }  # fmt: skip


def up(stream: int, start: float, length: float, octets: int) -> dict[str, Any]:
    return event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", stream, start, length, octets)


def down(stream: int, start: float, length: float, octets: int) -> dict[str, Any]:
    return event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", stream, start, length, octets)


def trace(timeline: Any) -> tuple[list[dict[str, Any]], dict[int, str]]:
    """A step of two blocks after the marks of five lanes, one of which copies nothing; and the marks."""
    lanes = {
        UP: "slots.up",
        DOWN: "slots.down",
        KEPT_UP: "boundaries.up",
        KEPT_DOWN: "boundaries.down",
        40: "deferred._up",
    }
    marks = {timeline.MARK + timeline.MARK_STEP * at: path for at, path in enumerate(lanes.values())}
    events = [
        {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "python"}},
        {
            "ph": "X",
            "cat": "cuda_runtime",
            "name": "cudaLaunchKernel",
            "pid": 1,
            "tid": 1,
            "ts": 1e9,
            "dur": 4.0,
            "args": {},
        },
        event("kernel", "fill", COMPUTE, 0.0, 2.0),
    ]
    events += [up(stream, 10.0 * at, 3.0, count) for at, (stream, count) in enumerate(zip(lanes, marks, strict=True))]
    events += [
        up(UP, 1000.0, 400.0, 20_000_000),
        up(UP, 1400.0, 400.0, 20_000_000),
        event("kernel", "gemm", COMPUTE, 1400.0, 300.0),
        event("kernel", "gemm", COMPUTE, 1600.0, 400.0),
        event("gpu_memset", "Memset (Device)", COMPUTE, 2000.0, 0.0, 8),
        event("gpu_memcpy", "Memcpy DtoD (Device -> Device)", COMPUTE, 2000.0, 100.0, 4096),
        down(KEPT_DOWN, 1700.0, 50.0, 2_000_000),
        up(KEPT_UP, 2100.0, 50.0, 2_000_000),
        down(DOWN, 2200.0, 500.0, 20_000_000),
        up(DATA, 1500.0, 1.0, 16_384),
        event("gpu_memcpy", "Memcpy DtoH (Device -> Pageable)", COMPUTE, 2990.0, 10.0, 12),
    ]
    return events, marks


def test_copies_are_of_the_lane_whose_mark_their_stream_carried(script: Any) -> None:
    timeline = script("timeline")
    spans = timeline.spans_of(*trace(timeline))
    rows = {row: [span for span in spans if span.row == row] for row in timeline.ROWS}
    assert {row: len(found) for row, found in rows.items()} == {
        "compute": 4, "weights up": 2, "weights down": 1, "gradients and state up": 0, "gradients and state down": 0,
        "boundaries up": 1, "boundaries down": 1, "embedding and head up": 0, "embedding and head down": 0, "other copies": 2,
    }  # fmt: skip
    first = rows["weights up"][0]
    assert (first.start, first.length, first.bytes) == (0.0, 0.0004, 20_000_000)  # marks and what was before are out
    assert rows["boundaries down"][0].start == pytest.approx(0.0007)


def test_shares_count_time_once_where_spans_overlap(script: Any) -> None:
    timeline = script("timeline")
    figures = timeline.shares(timeline.spans_of(*trace(timeline)))
    assert figures["seconds"] == pytest.approx(0.002)
    assert figures["rows"]["compute"] == {"busy": 0.35}  # 1400 to 2100 of 2000 microseconds
    assert figures["rows"]["weights up"] == {"busy": 0.4, "gb": 0.04, "gb_per_s": 50.0}
    assert figures["rows"]["weights down"] == {"busy": 0.25, "gb": 0.02, "gb_per_s": 40.0}
    assert "gradients and state up" not in figures["rows"]


def test_a_lane_without_a_stream_of_its_own_is_told_and_the_rest_is_kept(script: Any, capsys: Any) -> None:
    timeline = script("timeline")
    events, marks = trace(timeline)
    spans = timeline.spans_of(events, {**marks, 77: "head.up"})
    assert len(spans) == 11
    assert "no stream of its own for head.up" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="nothing on the GPU"):
        timeline.spans_of(events[:8], marks)


def test_every_lane_of_a_streamed_step_is_found(script: Any) -> None:
    from finetune.memory.streaming.boundaries import Boundaries
    from finetune.memory.streaming.deferred import Deferred
    from finetune.memory.streaming.flat import Flat
    from finetune.memory.streaming.slots import Slots
    from finetune.memory.streaming.tall import Tall
    from finetune.train.streamed import Ends
    from finetune.train.streamed_ends import StreamedHead

    timeline = script("timeline")
    device = torch.device("cpu")
    blocks = [torch.nn.Linear(4, 4) for _ in range(3)]
    slots = Slots([Flat(block, device, True) for block in blocks], 2, device)

    class Step:
        """Stands where train.streamed.Streamed does."""

        __module__ = "finetune.train.streamed"

    step = Step()
    tall = Tall(torch.nn.Parameter(torch.zeros(6, 4)), device)
    ends = Ends(None, StreamedHead(None, tall, torch.float32))
    vars(step).update(
        slots=slots, again=slots, deferred=Deferred(None, [], device), boundaries=Boundaries(device, True)
    )
    vars(step).update(ends=ends)
    lanes = timeline.lanes_of(step)
    assert sorted(lanes) == [
        "boundaries.down", "boundaries.up", "deferred._down", "deferred._up", "ends.head.tall._down", "ends.head.tall._up",
        "slots.down", "slots.up",
    ]  # fmt: skip
    assert lanes["slots.up"] is slots.up
    up_name, down_name = "Memcpy HtoD (Pinned -> Device)", "Memcpy DtoH (Device -> Pinned)"
    assert timeline.row_of("deferred._up", up_name) == "gradients and state up"
    assert timeline.row_of("boundaries.down", down_name) == "boundaries down"
    assert timeline.row_of("ends.head.tall._up", up_name) == "embedding and head up"
    assert timeline.row_of("slots.up", up_name) == "weights up"
    assert timeline.row_of("", up_name) == "other copies"
    assert timeline.lanes_of(None) == {}


def test_a_recording_is_drawn_where_there_is_no_gpu(script: Any, tmp_path: Path, monkeypatch: Any) -> None:
    timeline = script("timeline")
    spans = timeline.spans_of(*trace(timeline))
    cell = {"model": "builtin:tiny", "method": "lora", "tokens": 8192, "micro": 4096, "slots": 2}
    recorded = {"cell": cell, "gpu": "a GPU", **timeline.shares(spans)}
    recorded["spans"] = [[span.row, span.start, span.length, span.bytes] for span in spans]
    path = tmp_path / "spans.json.gz"
    path.write_bytes(gzip.compress(json.dumps(recorded).encode()))
    words = ["timeline.py", "--spans", str(path), "--out", str(tmp_path / "x" / "t.png"), "--zoom", "0.1:0.4"]
    monkeypatch.setattr(sys, "argv", words)
    assert timeline.main() == 0
    picture = (tmp_path / "x" / "t.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert len(picture) > 5_000


def test_without_a_gpu_it_says_that_it_needs_one(tmp_path: Path) -> None:
    words = [sys.executable, str(SCRIPTS / "timeline.py"), "--out", str(tmp_path / "t.png")]
    done = subprocess.run(
        words, capture_output=True, text=True, timeout=120, env={"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": "."}
    )
    assert done.returncode == 2
    assert done.stderr.strip() == "a timeline is of a GPU, and there is none here; --spans FILE draws a recording"
