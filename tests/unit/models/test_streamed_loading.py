"""A streamed model's way into host memory: the bits of a resident load, no second copy, refusals by file name."""

import gc
import io
import json

import pytest
import torch
from bitsandbytes.nn import Linear4bit
from rich.console import Console
from safetensors.torch import load_file, save_file

from finetune.errors import ModelError, NothingFitsError
from finetune.memory import host as pages
from finetune.memory.streaming.host_blocks import HostBlocks
from finetune.models import load
from finetune.models.load import load_model
from finetune.models.weight_files import WeightFiles
from finetune.telemetry.log import BytesProgress, Log
from finetune.train.assemble import host_room
from tests.unit.planner.live_bytes import LiveBytes

LORA = {"kind": "lora", "rank": 4}
CPU = torch.device("cpu")
WEIGHTS = "model.safetensors"
BY_TRANSFORMERS = "read by transformers into ordinary memory"


def streamed(recipe, precision="fp32", host=None, **more):
    host = host or HostBlocks(CPU, recipe.adapter.kind == "none", 2, 0)
    return load_model(recipe, host, precision, **more), host


def everything(model):
    """Every tensor of a model by name, what 4-bit weights keep outside parameters too."""
    found = {name: tensor.detach() for name, tensor in model.module.named_parameters(remove_duplicate=False)}
    found |= dict(model.module.named_buffers())
    for name, child in model.module.named_modules():
        if isinstance(child, Linear4bit):
            state = child.weight.quant_state
            found |= {f"{name}.absmax": state.absmax, f"{name}.code": state.code}
            if state.nested:
                found |= {f"{name}.offset": state.offset, f"{name}.nested": state.state2.absmax}
    return found


def same(one, other):
    ours, theirs = everything(one), everything(other)
    assert list(ours) == list(theirs)
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype, name
        assert torch.equal(ours[name], tensor), name
    assert one.base.generation_config.to_dict() == other.base.generation_config.to_dict()
    assert one.base.config.to_dict() == other.base.config.to_dict()


def held_by(model, host):
    """Blocks are views of the host's buffers."""
    assert len(host.flats) == len(model.blocks)
    assert all(flat.still_holds(block) for flat, block in zip(host.flats, model.blocks, strict=True))


def live_pages():
    gc.collect()
    return sum(isinstance(each, pages._Pages) for each in gc.get_objects())


def rewrite(folder, change):
    tensors = load_file(folder / WEIGHTS)
    save_file(change(tensors), folder / WEIGHTS, {"format": "pt"})


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen2-sliding", "qwen3"])
def test_every_architecture_is_read_straight_and_to_the_bit(recipe, make_folder, kind):
    wanted = recipe(make_folder(kind), adapter=LORA)
    model, host = streamed(wanted, "bf16")
    resident = load_model(wanted, "cpu", "bf16")
    same(model, resident)
    held_by(model, host)
    assert not [notice for notice in model.notices if BY_TRANSFORMERS in notice]
    assert set(resident.notices) <= set(model.notices)


def test_all_parameters_trained_tied_and_in_shards(recipe, make_base, make_folder):
    folder = make_folder("llama", tie_word_embeddings=True)
    (folder / WEIGHTS).unlink()
    make_base("llama", tie_word_embeddings=True).save_pretrained(folder, max_shard_size="20KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    model, host = streamed(recipe(folder))
    same(model, load_model(recipe(folder), "cpu", "fp32"))
    assert model.base.lm_head.weight is model.base.model.embed_tokens.weight
    assert all(parameter.requires_grad for parameter in model.module.parameters())
    held_by(model, host)


def test_conversions_on_the_way_are_counted(recipe, make_folder):
    model, _ = streamed(recipe(make_folder(), adapter=LORA), "bf16")
    count = len(load_file(f"{model.source}/{WEIGHTS}"))
    assert [
        n
        for n in model.notices
        if n.startswith(f"{count} tensors (0.00 GiB stored) were turned from f32 into bfloat16")
    ]
    exact, _ = streamed(recipe(make_folder(), adapter=LORA), "fp32")
    assert not [notice for notice in exact.notices if "were turned" in notice]


def test_names_that_differ_go_through_transformers_and_nothing_is_lost(recipe, make_folder):
    folder = make_folder()
    straight, _ = streamed(recipe(folder, adapter=LORA))
    rewrite(folder, lambda tensors: {name.removeprefix("model."): tensor for name, tensor in tensors.items()})
    model, host = streamed(recipe(folder, adapter=LORA))
    same(model, straight)
    held_by(model, host)
    [notice] = [notice for notice in model.notices if BY_TRANSFORMERS in notice]
    assert "no stored tensor is named model.embed_tokens.weight" in notice
    assert "nothing is lost" in notice


def test_missing_unused_and_fewer_blocks_read_as_in_a_resident_load(recipe, make_folder):
    folder = make_folder()
    fewer, host = streamed(recipe(folder, model={"layers": 2}, adapter=LORA))
    same(fewer, load_model(recipe(folder, model={"layers": 2}, adapter=LORA), "cpu", "fp32"))
    assert len(host.flats) == 2
    assert any("tensors are not used" in notice for notice in fewer.notices)
    rewrite(
        folder, lambda tensors: {**tensors, "other.weight": torch.ones(2), "model.rotary_emb.inv_freq": torch.ones(2)}
    )
    more, _ = streamed(recipe(folder, adapter=LORA))
    unused = "1 stored tensors are not used by LlamaForCausalLM (such as other.weight)"
    assert unused in more.notices
    assert unused in load_model(recipe(folder, adapter=LORA), "cpu", "fp32").notices
    rewrite(folder, lambda tensors: {name: each for name, each in tensors.items() if "layers.1.mlp.up" not in name})
    said = []
    for place in (CPU, HostBlocks(CPU, False, 2, 0)):
        with pytest.raises(ModelError, match="1 weights of LlamaForCausalLM are missing") as raised:
            load_model(recipe(folder, adapter=LORA), place, "fp32")
        said.append(str(raised.value))
    assert said[0] == said[1]


@pytest.mark.parametrize(("base", "double"), [("nf4", True), ("nf4", False), ("int8", True), ("fp8", True)])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_quantised_block_by_block_has_the_bits_of_a_resident_load(recipe, make_folder, base, double, precision):
    section = {"base": base, **({"double_quant": double} if base == "nf4" else {})}
    wanted = recipe(make_folder(hidden_size=64, intermediate_size=128), model=section, adapter=LORA)
    model, host = streamed(wanted, precision)
    resident = load_model(wanted, "cpu", precision)
    same(model, resident)
    held_by(model, host)
    assert set(resident.notices) <= set(model.notices)
    ids = torch.arange(8)[None]
    assert torch.equal(model.module(input_ids=ids).logits, resident.module(input_ids=ids).logits)


def test_a_checkpoint_stored_in_4_bits_keeps_its_bits(recipe, make_folder, tmp_path):
    quantised = recipe(make_folder(hidden_size=64), model={"base": "nf4"}, adapter=LORA)
    packed = load_model(quantised, "cpu", "fp32")
    inner = packed.module.unload()
    inner.save_pretrained(tmp_path / "packed")
    packed.tokenizer.save_pretrained(tmp_path / "packed")
    wanted = recipe(tmp_path / "packed", model={"base": "nf4"}, adapter=LORA)
    model, host = streamed(wanted)
    same(model, load_model(wanted, "cpu", "fp32"))
    held_by(model, host)
    assert any("it is stored in 4 bits" in notice for notice in model.notices)


@pytest.mark.parametrize("adapter", [{"init": "pissa"}, {"init": "olora"}, {"modules_to_save": ["lm_head"]}])
def test_what_an_adapter_changes_in_the_base_reaches_the_host(recipe, make_folder, adapter):
    wanted = recipe(make_folder(), adapter={**LORA, **adapter})
    model, host = streamed(wanted)
    same(model, load_model(wanted, "cpu", "fp32"))
    held_by(model, host)


def test_a_part_that_is_trained_in_another_type_reaches_the_host(recipe, make_folder):
    folder = make_folder()
    rewrite(folder, lambda tensors: {name: tensor.bfloat16() for name, tensor in tensors.items()})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    wanted = recipe(folder, train={"last_blocks": 1})
    model, host = streamed(wanted, "bf16")
    same(model, load_model(wanted, "cpu", "bf16"))
    held_by(model, host)
    assert {p.dtype for p in model.blocks[-1].parameters()} == {torch.float32}


def test_no_block_stands_twice_in_memory(recipe, make_folder):
    """Beside the host's pages (counted, too) only what is outside of blocks is made, and a piece on its way to another type."""
    folder = make_folder(num_hidden_layers=8, hidden_size=64, intermediate_size=256)
    size = (folder / WEIGHTS).stat().st_size
    with LiveBytes() as live:
        model, host = streamed(recipe(folder, adapter=LORA), "bf16", training=False)
    inside = {id(parameter) for block in model.blocks for parameter in block.parameters()}
    outside = sum(p.numel() * p.element_size() for p in model.module.parameters() if id(p) not in inside)
    assert size > 1_800_000
    assert host.host_bytes > 0.45 * size
    assert host.host_bytes <= live.peak < host.host_bytes + host.slots.bytes + outside + 0.05 * size


def test_b79_a_file_that_is_cut_short_is_refused_by_name(recipe, make_folder):
    folder = make_folder()
    whole = (folder / WEIGHTS).read_bytes()
    for length in (0, 5, 100, len(whole) // 2, len(whole) - 1):
        (folder / WEIGHTS).write_bytes(whole[:length])
        for place in (CPU, HostBlocks(CPU, False, 2, 0)):
            with pytest.raises(
                ModelError, match=rf"model\.safetensors is cut short.*{length:,} bytes|it has {length:,}"
            ):
                load_model(recipe(folder, adapter=LORA), place, "fp32")


def test_an_index_is_held_to_its_files(recipe, make_base, make_folder):
    folder = make_folder()
    (folder / WEIGHTS).unlink()
    make_base().save_pretrained(folder, max_shard_size="20KB")
    index = folder / "model.safetensors.index.json"
    sound = json.loads(index.read_text())
    name, file = next(iter(sound["weight_map"].items()))
    for change, said in (
        ({"absent": file}, f"the index says that {file} holds absent"),
        ({name: "../elsewhere.safetensors"}, "no safetensors file beside it"),
        ({name: "absent.safetensors"}, "absent.safetensors is missing"),
    ):
        index.write_text(json.dumps({**sound, "weight_map": {**sound["weight_map"], **change}}))
        with pytest.raises(ModelError, match=said):
            streamed(recipe(folder, adapter=LORA))
    index.write_text("[]")
    with pytest.raises(ModelError, match="is no index of weight files"):
        streamed(recipe(folder, adapter=LORA))


def test_a_tensor_in_two_files_needs_an_index(tmp_path):
    for name, value in (("a", 1.0), ("b", 2.0)):
        save_file({"weight": torch.tensor([value])}, tmp_path / f"{name}.safetensors")
    files = [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
    with pytest.raises(ModelError, match="nothing says which counts"):
        WeightFiles(files)
    for name, value in (("a", 1.0), ("b", 2.0)):
        read = WeightFiles(files, {"weight": f"{name}.safetensors"}).tensor("weight", torch.float32)
        assert read.tolist() == [value]


def test_a_file_that_shrinks_while_it_is_read_is_told_and_leaves_no_pages(recipe, make_folder):
    folder = make_folder()
    before = live_pages()

    def shrink(done, total):
        with open(folder / WEIGHTS, "r+b") as file:
            file.truncate(file.seek(0, 2) // 4)

    host = HostBlocks(CPU, False, 2, 0, None, shrink)
    with pytest.raises(ModelError, match=r"model\.safetensors became shorter while it was read"):
        load_model(recipe(folder, adapter=LORA), host, "fp32")
    assert host.flats == []
    assert live_pages() == before


@pytest.mark.parametrize("base", ["same", "nf4"])
def test_ctrl_c_leaves_no_pages_even_while_the_error_is_looked_at(recipe, make_folder, base):
    before = live_pages()

    def interrupt(done, total):
        if done > 0.5 * total:
            raise KeyboardInterrupt

    host = HostBlocks(CPU, False, 2, 0, None, interrupt)
    with pytest.raises(KeyboardInterrupt, match="of 3 blocks were in host memory, which is given back") as raised:
        load_model(recipe(make_folder(), model={"base": base}, adapter=LORA), host, "fp32")
    assert raised.value is not None
    assert live_pages() == before


def test_an_error_after_the_blocks_arrived_leaves_no_pages(recipe, make_folder, monkeypatch):
    before = live_pages()
    broken = make_folder()
    rewrite(broken, lambda tensors: {**tensors, "model.norm.weight": torch.full((32,), float("nan"))})
    monkeypatch.setattr(load, "verify", lambda *_, **__: (_ for _ in ()).throw(ModelError("stop")))
    host = HostBlocks(CPU, False, 2, 0)
    with pytest.raises(ModelError, match="stop"):
        load_model(recipe(broken, adapter=LORA), host, "fp32")
    assert host.flats == []
    assert live_pages() == before


@pytest.mark.parametrize("base", ["same", "nf4", "int8"])
def test_what_does_not_fit_the_host_is_refused_before_the_first_page(recipe, make_folder, base):
    wanted = recipe(make_folder(), model={"base": base}, adapter=LORA)
    _, fitting = streamed(wanted)
    host = HostBlocks(CPU, False, 2, 0, fitting.host_bytes - 1)
    with pytest.raises(NothingFitsError, match=r"the 3 streamed blocks need .* MiB of host memory") as raised:
        load_model(wanted, host, "fp32")
    said = str(raised.value)
    assert "0 (0.0 MiB) were taken" in said
    assert "`ulimit -l` allows" in said
    assert "plan.host_memory" in said
    streamed(wanted, host=HostBlocks(CPU, False, 2, 0, fitting.host_bytes))


def test_room_is_what_is_free_and_allowed_shared_by_the_processes(recipe):
    assert host_room(recipe("builtin:tiny"), 1000, 2) == 500
    assert host_room(recipe("builtin:tiny", plan={"host_memory": 300}), 1000, 2) == 150
    assert host_room(recipe("builtin:tiny", plan={"host_memory": 3000}), 1000, 1) == 1000


def test_pages_that_the_system_refuses_are_told():
    with pytest.raises(NothingFitsError, match=r"the system refused .* bytes of host memory .*this process holds"):
        pages.host_pages(2**60, CPU)


def test_progress_goes_up_to_the_bytes_of_all_blocks(recipe, make_folder):
    told = []
    host = HostBlocks(CPU, False, 2, 0, None, lambda done, total: told.append((done, total)))
    streamed(recipe(make_folder(), adapter=LORA), host=host)
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    assert len(told) > 9
    assert {total for _, total in told} == {host.host_bytes}
    assert told[-1][0] == host.host_bytes


def test_progress_in_a_log_file_is_a_line_now_and_then_and_one_at_the_end(monkeypatch):
    monkeypatch.setattr("finetune.telemetry.log.SECONDS_BETWEEN_LINES", 0.0)
    text = io.StringIO()
    with BytesProgress(Log(console=Console(file=text, width=120)), "weights to host memory") as bar:
        bar(2**30, 2**32)
        bar(2**32, 2**32)
    lines = text.getvalue().splitlines()
    assert lines[:2] == ["weights to host memory: 1.0 GiB of 4.0 GiB", "weights to host memory: 4.0 GiB of 4.0 GiB"]
    assert lines[2].startswith("weights to host memory: 4.0 GiB in 0.")
    assert len(lines) == 3
    silent = io.StringIO()
    with BytesProgress(Log(console=Console(file=silent)), "weights to host memory"):
        pass
    assert silent.getvalue() == ""


def test_packing_leaves_no_holes_in_the_heap(recipe, make_folder):
    """What is unpacked on the way is larger than the bound, so it was given back block by block."""
    folder = make_folder(num_hidden_layers=12, hidden_size=512, intermediate_size=1024)
    before = pages._field("/proc/self/status", "RssAnon")
    model, _ = streamed(recipe(folder, model={"base": "int8"}, adapter=LORA), training=False)
    grown = pages._field("/proc/self/status", "RssAnon") - before
    assert (folder / WEIGHTS).stat().st_size > 100 * 2**20
    assert grown < 50 * 2**20
    assert len(model.blocks) == 12
