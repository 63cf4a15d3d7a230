"""The line between memory and speed: which plans are shown, and the picture."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from finetune.commands import plan as command
from finetune.errors import InputError
from finetune.planner.picture import check_picture
from finetune.planner.report import line_of

ASKED = ["recipe=lora_llama3", "hardware=1x24GB,64GB"]


def test_a_long_line_is_cut_evenly_and_keeps_its_ends() -> None:
    assert line_of(range(15), 8) == [0, 2, 4, 6, 8, 10, 12, 14]
    assert line_of(range(3), 8) == [0, 1, 2]


def test_the_picture_is_a_png_beside_the_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.png"
    assert command.main([*ASKED, f"picture={path}", "--json"]) == 0
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    told = json.loads(capsys.readouterr().out)
    promised = "fits plan gpu_bytes host_bytes seconds_per_step tokens_per_s smallest alternatives reasons"
    assert set(promised.split()) <= set(told)


def test_the_table_shows_plans_of_the_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main([*ASKED, "--json"]) == 0
    line = json.loads(capsys.readouterr().out)["alternatives"]
    assert command.main(ASKED) == 0
    text = capsys.readouterr().out.partition("Other plans")[2]
    assert {"smallest", "chosen"} <= set(text.split())
    assert len(line) > 2
    assert f"{line[-1]['relative_seconds']:.2f}x" in text


@pytest.mark.parametrize(("name", "what"), [("plan.svg", "is no PNG"), ("none/plan.png", "there is no folder")])
def test_a_picture_that_cannot_be_written_is_refused_first(tmp_path: Path, name: str, what: str) -> None:
    with pytest.raises(InputError, match=what):
        check_picture(str(tmp_path / name))


def test_without_matplotlib_the_error_says_how_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InputError, match="finetune\\[plots\\]"):
        check_picture(str(tmp_path / "plan.png"))
