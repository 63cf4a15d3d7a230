"""The estimate against counted bytes of tiny Llamas on the CPU: what autograd saves, and a step's widest moment."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from finetune.config.schema import Recipe
from finetune.contracts import Plan, Shape
from finetune.memory import activations, checkpointing
from finetune.memory.chunked_loss import loss_sum
from finetune.memory.storage import Storage, Work, storage_of, trained_tensors, weight_bytes
from finetune.models.shapes import shape_of
from finetune.planner.estimate import Estimate, Facts, estimate
from tests.unit.planner.live_bytes import LiveBytes, saved_bytes

ROWS, LENGTH = 8, 80
TARGETS = {
    "full": None,
    "lora": "all-linear",
    "lora q,v": ["q_proj", "v_proj"],
    "lora down": ["down_proj"],
}


def config_of(vocabulary: int = 512, tied: bool = False, attention: str = "sdpa") -> LlamaConfig:
    return LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
        attn_implementation=attention,
    )


def recipe_of(kind: str, packed: bool = False, attention: str = "auto") -> Recipe:
    adapter: dict[str, Any] = {"kind": "none"}
    if TARGETS[kind]:
        adapter = {"kind": "lora", "rank": 8, "targets": TARGETS[kind]}
    return Recipe.model_validate(
        {"model": {"path": "x", "attention": attention}, "adapter": adapter, "data": {"pack": packed}}
    )


def built(kind: str, config: LlamaConfig, precision: str) -> tuple[nn.Module, Any]:
    """A model as a run holds it: trained weights in fp32, frozen ones as computed."""
    torch.manual_seed(0)
    base = LlamaForCausalLM(config)
    if TARGETS[kind] is None:
        return base.train(), base
    base = base.to(torch.bfloat16) if precision == "bf16" else base
    model = get_peft_model(base, LoraConfig(r=8, target_modules=TARGETS[kind]))
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    return model.train(), base


def mask_of(packed: bool) -> torch.Tensor | None:
    return torch.ones(ROWS, 1, LENGTH, LENGTH, dtype=torch.bool).tril() if packed else None


def expected_saved(shape: Shape, storage: Storage, checkpoint: bool) -> int:
    work = Work(ROWS, LENGTH)
    total = checkpointing.kept_bytes(shape, storage, work, checkpoint)
    total += activations.saved_outside(shape, storage, work)
    tables = 2 * shape.head_dim * storage.stream * LENGTH
    if storage.packed:
        # The mask is saved by none (its float form is), and one row of rotary tables serves all here.
        total -= tables * (ROWS - 1)
    if checkpoint:
        # The tables wait as arguments of the recomputation, not as saved tensors.
        total -= tables
    return total + (8 * ROWS * LENGTH if storage.trained else 0)  # the embedding keeps the token ids


@pytest.mark.parametrize("checkpoint", [False, True], ids=["kept", "checkpointed"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", TARGETS)
@pytest.mark.parametrize("variant", ["sdpa", "packed", "eager"])
def test_saved_bytes_are_as_counted(variant: str, kind: str, precision: str, checkpoint: bool) -> None:
    attention = "eager" if variant == "eager" else "sdpa"
    packed = variant == "packed"
    config = config_of(attention=attention)
    model, base = built(kind, config, precision)
    checkpointing.apply(model, checkpoint)
    ids = torch.randint(0, config.vocab_size, (ROWS, LENGTH))
    with saved_bytes(model) as seen, torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
        base.model(input_ids=ids, attention_mask=mask_of(packed), use_cache=False)
    counted = sum(seen.values())
    shape = shape_of(config)
    storage = storage_of(shape, recipe_of(kind, packed, attention), precision)
    assert expected_saved(shape, storage, checkpoint) == pytest.approx(counted, rel=0.05)
    if precision == "fp32" and kind in ("full", "lora"):
        assert expected_saved(shape, storage, checkpoint) == counted


def run_step(model: nn.Module, base: Any, optimizer: Any, data: torch.Tensor, plan: Plan, precision: str) -> None:
    train = optimizer is not None
    for start in range(0, len(data), plan.micro_batch):
        ids = data[start : start + plan.micro_batch].clone()
        labels = ids.clone()
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"), torch.set_grad_enabled(train):
            hidden = base.model(input_ids=ids, use_cache=False).last_hidden_state
            loss = loss_sum(hidden, base.lm_head, labels, plan.loss_chunk)
            del hidden
        if train:
            loss.backward()
        del loss, ids, labels
    if train:
        optimizer.step()
        optimizer.zero_grad()


def moving(found: Estimate, phase: str) -> int:
    """Bytes of a phase that come and go."""
    return found.phases[phase].total - sum(
        found.phases[phase].causes.get(cause, 0) for cause in ("weights", "optimizer", "process", "allocator")
    )


STEPS = [
    (kind, precision, checkpoint, chunk, rows, vocabulary, tied)
    for kind in ("full", "lora")
    for precision in ("fp32", "bf16")
    for checkpoint in (False, True)
    for chunk in (0, 128)
    for rows, vocabulary, tied in [(8, 512, False), (16, 512, False), (8, 4096, True)]
]


@pytest.mark.parametrize(("kind", "precision", "checkpoint", "chunk", "rows", "vocabulary", "tied"), STEPS)
def test_the_widest_moment_of_a_step_is_as_counted(
    kind: str, precision: str, checkpoint: bool, chunk: int, rows: int, vocabulary: int, tied: bool
) -> None:
    config = config_of(vocabulary, tied)
    model, base = built(kind, config, precision)
    checkpointing.apply(model, checkpoint)
    plan = Plan("cpu", ROWS, checkpoint, chunk)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    data = torch.randint(0, vocabulary, (rows, LENGTH))
    run_step(model, base, optimizer, data, plan, precision)  # the optimizer's state stands from here on
    with LiveBytes() as step:
        run_step(model, base, optimizer, data, plan, precision)
    model.eval()
    with LiveBytes() as evaluation:
        run_step(model, base, None, data[:ROWS], plan, precision)
    facts = Facts(LENGTH, precision, lambda elements, role: 8 * elements + 4, rows)
    found = estimate(shape_of(config), recipe_of(kind), plan, facts)
    assert moving(found, "step") == pytest.approx(step.peak, rel=0.05)
    assert moving(found, "evaluate") == pytest.approx(evaluation.peak, rel=0.05)
    assert found.phases["evaluate"].total <= found.phases["step"].total
    assert found.phases["save"].total <= found.phases["step"].total


@pytest.mark.parametrize("kind", TARGETS)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("tied", [False, True])
def test_weights_gradients_and_optimizer_are_as_counted(kind: str, precision: str, tied: bool) -> None:
    config = config_of(tied=tied)
    model, base = built(kind, config, precision)
    shape = shape_of(config)
    storage = storage_of(shape, recipe_of(kind), precision)
    assert weight_bytes(shape, storage) == sum(p.numel() * p.element_size() for p in model.parameters())
    trained = [p for p in model.parameters() if p.requires_grad]
    assert sorted(elements for elements, _ in trained_tensors(shape, storage)) == sorted(p.numel() for p in trained)
    optimizer = torch.optim.AdamW(trained)
    run_step(model, base, optimizer, torch.randint(0, 512, (1, 8)), Plan("cpu", 1, False, 0), precision)
    state = sum(value.numel() * value.element_size() for entry in optimizer.state.values() for value in entry.values())
    found = estimate(
        shape, recipe_of(kind), Plan("cpu", 1, False, 0), Facts(8, precision, lambda elements, role: 8 * elements + 4)
    )
    assert found.phases["step"].causes["optimizer"] == state


def test_adapted_head_and_dropout_are_in_the_counts() -> None:
    shape = shape_of(config_of())
    section = {"kind": "lora", "rank": 8, "targets": ["q_proj", "lm_head", "embed_tokens"], "dropout": 0.1}
    storage = storage_of(shape, Recipe.model_validate({"model": {"path": "x"}, "adapter": section}), "fp32")
    assert storage.head_adapted
    assert storage.embedding_adapted
    elements = sum(elements for elements, _ in trained_tensors(shape, storage))
    assert elements == 8 * (3 * (64 + 64) + 2 * (64 + 512))


def test_evaluation_bytes_do_not_depend_on_the_rows_of_the_set() -> None:
    """Case B134: only sums are kept, so the micro-batch alone decides."""
    config = config_of(4096)
    model, base = built("lora", config, "fp32")
    model.eval()
    peaks = []
    for rows in (8, 32):
        with LiveBytes() as live:
            run_step(model, base, None, torch.randint(0, 4096, (rows, LENGTH)), Plan("cpu", 4, False, 64), "fp32")
        peaks.append(live.peak)
    assert peaks[1] <= peaks[0] * 1.01 + 32 * LENGTH * 8
