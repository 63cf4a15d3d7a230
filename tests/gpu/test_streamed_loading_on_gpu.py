"""A streamed model's way into pinned memory: packed on the GPU block by block, with the bits of a model loaded there whole."""

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from finetune.config.schema import Recipe
from finetune.memory.streaming.host_blocks import HostBlocks
from finetune.models.builtin import resolve
from finetune.models.load import load_model
from tests.unit.models.conftest import WIDTHS
from tests.unit.models.test_streamed_loading import everything, held_by

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("base", ["same", "nf4", "int8", "fp8"])
def test_bits_are_those_of_a_resident_load(tmp_path, base):
    device = torch.device("cuda", 0)
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**{**WIDTHS, "hidden_size": 128, "intermediate_size": 256})).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(resolve("builtin:tiny")).save_pretrained(tmp_path)
    recipe = Recipe.model_validate(
        {"model": {"path": str(tmp_path), "base": base}, "adapter": {"kind": "lora", "rank": 4}}
    )
    resident = everything(load_model(recipe, device, "bf16"))
    host = HostBlocks(device, False, 2, 0)
    model = load_model(recipe, host, "bf16")
    held_by(model, host)
    streamed = everything(model)
    assert list(streamed) == list(resident)
    for name, tensor in resident.items():
        assert torch.equal(streamed[name].to(device), tensor), name
    blocks = {tensor.device.type for name, tensor in streamed.items() if ".layers." in name and "lora_" not in name}
    assert blocks == {"cpu"}
