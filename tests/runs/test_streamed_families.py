"""Model families from folders: a streamed run has the bits of the resident one, or is refused by the model's name."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers
import yaml
from torch import nn
from transformers import AutoTokenizer

import finetune
from finetune.__main__ import main
from finetune.errors import ModelError
from finetune.kernels.precision import compute
from finetune.models.builtin import resolve
from finetune.models.decoder import assemble
from finetune.models.layerwise import Layers, check
from finetune.models.shapes import shape_of
from tests.conftest import changed, method
from tests.runs.history import column

WIDTHS: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
GROUPED = {**WIDTHS, "num_key_value_heads": 2}
SCALED = {**GROUPED, "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 16, "tie_word_embeddings": True}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral": ("MistralConfig", {**GROUPED, "sliding_window": 16}),
    "qwen2": ("Qwen2Config", {**GROUPED, "use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}),
    "qwen3": ("Qwen3Config", {**GROUPED, "head_dim": 8}),
    "llama-tied": ("LlamaConfig", {**GROUPED, "tie_word_embeddings": True}),
    "phi3": ("Phi3Config", GROUPED),
    "gpt-neox": ("GPTNeoXConfig", {**WIDTHS, "rotary_pct": 0.5}),
    "gemma2": ("Gemma2Config", {**SCALED, "final_logit_softcapping": 5.0}),
    "gemma3": ("Gemma3TextConfig", SCALED),
    "mixtral": ("MixtralConfig", {**GROUPED, "num_local_experts": 4}),
    "falcon": ("FalconConfig", {name: WIDTHS[name] for name in ("vocab_size", "hidden_size", "num_hidden_layers",
               "num_attention_heads", "bos_token_id", "eos_token_id")}),
}  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("families")
    tokenizer = AutoTokenizer.from_pretrained(resolve("builtin:tiny"))
    for name, (kind, settings) in FAMILIES.items():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, kind)(**settings))
        model.save_pretrained(root / name)
        tokenizer.save_pretrained(root / name)
    return {name: str(root / name) for name in FAMILIES}


def job(tiny: dict[str, Any], folder: str, kind: str, pack: bool) -> dict[str, Any]:
    plan = {"weights": "streamed", "micro_batch": 2, "loss_chunk": 0, "activation_checkpointing": True}
    recipe = changed(method(tiny, kind), plan=plan, model__path=folder, train__max_steps=2, data__valid_path=None)
    if "gemma2" in folder:
        recipe["model"]["attention"] = "eager"
    return changed(recipe, data__pack=pack, data__max_tokens=128)


@pytest.mark.parametrize(("kind", "pack"), [("none", True), ("lora", False)])
@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "falcon"])
def test_streamed_has_the_bits_of_resident(
    tiny: dict[str, Any], folders: dict[str, str], family: str, kind: str, pack: bool
) -> None:
    recipe = job(tiny, folders[family], kind, pack)
    resident = finetune.run(changed(recipe, run__dir="resident", plan__weights="resident"))
    streamed = finetune.run(changed(recipe, run__dir="streamed"))
    tied = kind == "none" and FAMILIES[family][1]["tie_word_embeddings"]
    for name in ("loss", "grad_norm"):
        wanted = column(resident.dir, name)
        assert len(wanted) == 2
        # A tied matrix gets its two gradients in another order.
        assert column(streamed.dir, name) == (pytest.approx(wanted, rel=1e-6) if tied else wanted)


@pytest.mark.parametrize("family", ["gpt-neox", "phi3", "gemma3"])
def test_in_bf16_too(tiny: dict[str, Any], folders: dict[str, str], family: str) -> None:
    """Parts of the model run apart from the whole forward must meet the same autocast."""
    recipe = changed(job(tiny, folders[family], "none", False), model__precision="bf16")
    resident = finetune.run(changed(recipe, run__dir="resident", plan__weights="resident"))
    streamed = finetune.run(changed(recipe, run__dir="streamed"))
    assert column(streamed.dir, "loss") == pytest.approx(column(resident.dir, "loss"), rel=1e-6)


@pytest.mark.parametrize("family", ["mistral", "qwen2", "qwen3", "llama-tied"])
@pytest.mark.parametrize("kind", ["none", "lora"])
def test_ends_on_the_host_agree(tiny: dict[str, Any], folders: dict[str, str], family: str, kind: str) -> None:
    recipe = changed(job(tiny, folders[family], kind, True), plan__fast_block=True)
    here = finetune.run(changed(recipe, run__dir="here"))
    ends = {"plan__embedding_placement": "host", "plan__head_placement": "host"}
    there = finetune.run(changed(recipe, run__dir="there", **ends))
    for name in ("loss", "grad_norm"):
        assert column(there.dir, name) == pytest.approx(column(here.dir, name), rel=1e-5)


def test_blocks_that_return_more_are_refused_by_name(
    tiny: dict[str, Any], folders: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(job(tiny, folders["falcon"], "lora", False)))
    assert main([f"recipe={path}"]) == 2
    shown = capsys.readouterr().err
    assert "FalconDecoderLayer returns more than its hidden states" in shown
    assert "plan.weights=resident" in shown


class Remembering(nn.Module):
    """Wraps a block: gives its output to whoever comes next through an object that all of them share."""

    def __init__(self, block: nn.Module, shared: dict[str, Any]) -> None:
        super().__init__()
        self.block = block
        self.shared = shared

    def forward(self, hidden_states: torch.Tensor, **given: Any) -> torch.Tensor:
        out = self.block(hidden_states, **given)
        before = self.shared.get("last")
        self.shared["last"] = out
        return out if before is None or before.shape != out.shape else out + 0.5 * before


class Passing(Remembering):
    """The same through what the model gives every block anew at each forward."""

    def forward(self, hidden_states: torch.Tensor, given_box: Any = None, **given: Any) -> torch.Tensor:
        self.shared = given_box
        return super().forward(hidden_states, **given)


def parts_of(wrap: Any) -> Any:
    torch.manual_seed(0)
    settings = {**GROUPED, "initializer_range": 0.3}
    base = transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings)).eval()
    blocks = base.model.layers
    for number, block in enumerate(blocks):
        blocks[number] = wrap(block)
    return assemble(base, None, shape_of(base.config), "fake")


def layers_of(model: Any) -> Layers:
    return Layers(model, lambda: compute(torch.device("cpu"), "fp32", "fp32"))


def test_plain_blocks_pass_the_check_and_stay_as_they_were() -> None:
    model = parts_of(lambda block: block)
    model.module.train()
    blocks = list(model.blocks)
    state = torch.get_rng_state()
    check(model, layers_of(model), True)
    assert all(block is other for block, other in zip(model.backbone.layers, blocks, strict=True))
    assert model.module.training
    assert torch.equal(torch.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in model.module.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.module.modules())


@pytest.mark.parametrize("packed", [False, True])
def test_blocks_that_share_a_state_are_refused(packed: bool) -> None:
    shared: dict[str, Any] = {}
    model = parts_of(lambda block: Remembering(block, shared))
    with pytest.raises(ModelError, match="the blocks of LlamaForCausalLM share more than their input"):
        check(model, layers_of(model), packed)


def test_blocks_that_pass_a_state_along_their_arguments_are_refused() -> None:
    """Forward would be right, and backward, which runs blocks last first, would miss a gradient."""
    model = parts_of(lambda block: Passing(block, {}))
    # Llama hands unknown arguments on to its blocks.
    model.backbone.register_forward_pre_hook(
        lambda module, given, named: (given, {**named, "given_box": {}}), with_kwargs=True
    )
    with pytest.raises(ModelError, match="share more than their input"):
        check(model, layers_of(model), False)


@pytest.fixture
def sharing_llama(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """Llama whose blocks add half of the last block's output, which a class remembers: a real folder of such a model."""
    from transformers.models.llama import modeling_llama

    plain = modeling_llama.LlamaDecoderLayer.forward
    last: list[torch.Tensor] = []

    def forward(self: Any, hidden_states: torch.Tensor, *args: Any, **named: Any) -> torch.Tensor:
        out = plain(self, hidden_states, *args, **named)
        extra = last[-1] if last and last[-1].shape == out.shape and self.self_attn.layer_idx else 0.0 * out
        last[:] = [out.detach()]
        return out + 0.5 * extra

    monkeypatch.setattr(modeling_llama.LlamaDecoderLayer, "forward", forward)
    yield sys.modules[modeling_llama.__name__]
    last.clear()


def test_a_run_of_such_a_model_ends_with_two(
    tiny: dict[str, Any], folders: dict[str, str], sharing_llama: ModuleType, tmp_path: Path, capsys: Any
) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(job(tiny, folders["llama-tied"], "lora", False)))
    assert main([f"recipe={path}"]) == 2
    assert "the blocks of LlamaForCausalLM share more than their input" in capsys.readouterr().err
    assert not (tmp_path / "run/metrics.jsonl").exists()
