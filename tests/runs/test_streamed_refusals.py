"""What streamed weights cannot keep is refused by name, on the command line with exit code 2, and no pin is bent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

import finetune
from finetune.__main__ import main
from finetune.errors import InputError
from finetune.models.builtin import resolve
from tests.conftest import changed, method
from tests.runs.history import column
from tests.runs.ranks import endings

FULL, LORA = "none", "lora"
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (FULL, {"model__precision": "fp16"}, r"updates weights when they are fetched, and fp16 skips updates"),
    (FULL, {"train__last_blocks": 1}, r"train\.last_blocks, modules or freeze choose a part"),
    (FULL, {"train__modules": ["*q_proj*"]}, r"train\.last_blocks, modules or freeze choose a part"),
    (FULL, {"train__freeze": ["embed_tokens"]}, r"train\.last_blocks, modules or freeze choose a part"),
    (FULL, {"optimizer__name": "adafactor"}, r"updates tensors slice by slice, which adafactor cannot"),
    (FULL, {"optimizer__name": "muon"}, r"updates tensors slice by slice, which muon cannot"),
    (FULL, {"optimizer__name": "paged_adamw8bit"}, r"updates tensors slice by slice, which paged_adamw8bit cannot"),
    (LORA, {"plan__activation_checkpointing": False}, r"recomputes every block"),
    (LORA, {"plan__activation_checkpointing": 2}, r"recomputes every block"),
    (LORA, {"plan__activation_checkpointing": "selective"}, r"recomputes every block"),
    (LORA, {"plan__optimizer_in_backward": True, "train__max_grad_norm": None}, r"optimizer state of blocks is on the host"),
    (LORA, {"plan__optimizer_placement": "host"}, r"optimizer state of blocks is on the host already"),
    (LORA, {"plan__resident_blocks": 3}, r"plan\.resident_blocks=3, but tiny has 2 blocks"),
    (LORA, {"plan__slots": 3}, r"plan\.slots=3, but tiny has 2 blocks"),
    (LORA, {"plan__weights": "resident", "plan__resident_blocks": 1}, r"only streamed weights leave blocks on the host"),
    (LORA, {"plan__weights": "auto", "plan__slots": 2}, r"only streamed weights pass through slots"),
    (LORA, {"plan__weights": "auto", "plan__head_placement": "host"}, r"only a streamed step takes the head"),
    (LORA, {"plan__head_placement": "host", "plan__exact": "bitwise"}, r"head_placement=host gives reordered sums"),
    (LORA, {"plan__head_placement": "host", "adapter__targets": ["q_proj", "lm_head"]}, r"is for a head of one matrix"),
    (LORA, {"plan__head_placement": "host", "adapter__modules_to_save": ["lm_head"]}, r"is for a head of one matrix"),
    (LORA, {"plan__head_placement": "host", "model__new_tokens": ["<a>"]}, r"is for a head of one matrix"),
    (LORA, {"plan__weights": "auto", "plan__head_placement": "visit"}, r"only a streamed step brings the head"),
    (LORA, {"plan__head_placement": "visit", "adapter__targets": ["q_proj", "lm_head"]}, r"is for a head of one matrix"),
    (LORA, {"plan__head_placement": "visit", "adapter__modules_to_save": ["lm_head"]}, r"is for a head of one matrix"),
    (LORA, {"plan__head_placement": "visit", "model__new_tokens": ["<a>"]}, r"is for a head of one matrix"),
    (FULL, {"plan__embedding_placement": "host"}, r"adapter\.kind=none trains it; with fast blocks \(plan\.fast_block=true\)"),
    (FULL, {"plan__embedding_placement": "host", "plan__fast_block": True, "plan__exact": "bitwise"},
     r"embedding_placement=host gives reordered sums"),
    (LORA, {"plan__embedding_placement": "host", "plan__fast_block": True, "adapter__targets": ["q_proj", "embed_tokens"]},
     r"adapter\.targets reaches it"),
    (LORA, {"plan__embedding_placement": "host", "plan__fast_block": True, "adapter__modules_to_save": ["embed_tokens"]},
     r"adapter\.modules_to_save train rows of it"),
    (LORA, {"plan__embedding_placement": "host", "plan__fast_block": True, "model__new_tokens": ["<a>"]},
     r"model\.new_tokens or adapter\.modules_to_save train rows of it"),
]  # fmt: skip


def streamed(tiny: dict[str, Any], kind: str) -> dict[str, Any]:
    recipe = changed(method(tiny, kind), plan={"weights": "streamed", "micro_batch": 2, "loss_chunk": 0})
    return changed(recipe, train__max_steps=2, data__valid_path=None)


@pytest.mark.parametrize(("kind", "changes", "said"), REFUSED)
def test_refused_with_its_message(tiny: dict[str, Any], kind: str, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        finetune.run(changed(streamed(tiny, kind), **changes))


TIED = [
    ({"head_placement": "host"}, r"which only fast blocks can \(plan\.fast_block=true\)"),
    ({"embedding_placement": "host"}, r"shares its matrix with the head; with fast blocks"),
    ({"head_placement": "host", "embedding_placement": "device", "fast_block": True}, r"one matrix for embedding and head"),
    ({"head_placement": "device", "embedding_placement": "host", "fast_block": True}, r"one matrix for embedding and head"),
    ({"head_placement": "visit"}, r"head_placement=visit is for a head of its own"),
    ({"head_placement": "visit", "fast_block": True}, r"has one matrix for embedding and head"),
    ({"embedding_placement": "host", "fast_block": True, "exact": "bitwise"}, r"which plan\.exact=bitwise forbids"),
]  # fmt: skip


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tied")
    config = LlamaConfig(
        vocab_size=300, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=True, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(resolve("builtin:tiny")).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize(("pins", "said"), TIED)
def test_one_matrix_for_two_ends_is_in_one_place(
    tiny: dict[str, Any], tied: str, pins: dict[str, Any], said: str
) -> None:
    recipe = changed(streamed(tiny, LORA), model__path=tied)
    recipe["plan"] |= pins
    with pytest.raises(InputError, match=said):
        finetune.run(recipe)


@pytest.mark.parametrize("end", ["head_placement", "embedding_placement"])
def test_a_tied_plan_says_where_both_ends_are(tiny: dict[str, Any], tied: str, end: str) -> None:
    recipe = changed(streamed(tiny, FULL), model__path=tied, plan__fast_block=True)
    plain = finetune.run(changed(recipe, run__dir="plain"))
    hosted = finetune.run(changed(recipe, run__dir="hosted", **{f"plan__{end}": "host"}))
    plan = yaml.safe_load((hosted.dir / "plan.yaml").read_text())
    assert (plan["embedding_placement"], plan["head_placement"]) == ("host", "host")
    assert column(hosted.dir, "loss") == pytest.approx(column(plain.dir, "loss"), abs=1e-5)


KEPT: list[tuple[str, dict[str, Any]]] = [
    (LORA, {"adapter__kind": "dora"}),
    (LORA, {"adapter__init": "pissa"}),
    (LORA, {"adapter__modules_to_save": ["embed_tokens", "lm_head", "input_layernorm"]}),
    (LORA, {"adapter__targets": ["q_proj", "embed_tokens", "lm_head"]}),
    (LORA, {"model__new_tokens": ["<a>", "<b>"]}),
    (FULL, {"model__new_tokens": ["<a>", "<b>"]}),
    (LORA, {"optimizer__name": "muon"}),
    (LORA, {"optimizer__name": "adafactor"}),
    (LORA, {"model__precision": "fp16"}),
    (FULL, {"train__batch": None, "train__batch_tokens": 600}),
    (FULL, {"plan__exact": "bitwise"}),
    (FULL, {"optimizer__groups": {"*norm*": "lr_factor=0.1 weight_decay=0.5"}, "optimizer__weight_decay": 0.3}),
    (FULL, {"train__max_grad_norm": 0.01, "model__attention": "eager"}),
    (FULL, {"model__precision": "bf16", "model__trained": "stochastic", "optimizer__name": "adamw4bit"}),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "changes"), KEPT)
def test_kept_to_the_bits_of_a_resident_run(tiny: dict[str, Any], kind: str, changes: dict[str, Any]) -> None:
    recipe = changed(streamed(tiny, kind), plan__activation_checkpointing=True, **changes)
    resident = finetune.run(changed(recipe, run__dir="resident", plan__weights="resident"))
    moved = finetune.run(changed(recipe, run__dir="streamed"))
    for name in ("loss", "grad_norm"):
        assert column(moved.dir, name) == column(resident.dir, name)


@pytest.mark.parametrize("pins", [{"slots": 1}, {"slots": 1, "resident_blocks": 1}, {"resident_blocks": 2}])
def test_any_number_of_slots_gives_the_same_bits(tiny: dict[str, Any], pins: dict[str, int]) -> None:
    recipe = streamed(tiny, FULL)
    two = finetune.run(changed(recipe, run__dir="two"))
    recipe["plan"] |= pins
    other = finetune.run(changed(recipe, run__dir="other"))
    assert column(other.dir, "loss") == column(two.dir, "loss")
    assert column(other.dir, "grad_norm") == column(two.dir, "grad_norm")


def test_several_processes_are_refused(tiny: dict[str, Any]) -> None:
    for ending in endings(streamed(tiny, LORA), 2):
        assert isinstance(ending, InputError)
        assert "plan.weights=streamed is for one process, and 2 were started" in str(ending)


def test_the_command_line_ends_with_two(
    tiny: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(streamed(tiny, FULL)))
    assert main([f"recipe={path}", "optimizer.name=muon"]) == 2
    shown = capsys.readouterr().err
    assert "updates tensors slice by slice, which muon cannot" in shown
    assert "optimizer.name=adamw" in shown
    assert not (tmp_path / "run/metrics.jsonl").exists()
