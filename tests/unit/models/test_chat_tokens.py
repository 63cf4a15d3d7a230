"""Turn ends, generation settings and chat tokens that were never trained."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from finetune.models.chat_tokens import align_generation, stop_tokens, template_tokens, turn_end, untrained_tokens
from finetune.models.load import load_model

EOS, PAD, IM_START, IM_END = 257, 258, 259, 260


@pytest.fixture
def tokenizer(tiny):
    return AutoTokenizer.from_pretrained(tiny)


def test_turn_end_is_read_from_the_template(tokenizer):
    assert turn_end(tokenizer) == IM_END
    assert template_tokens(tokenizer) == [IM_START, IM_END]
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] + eos_token }}{% endfor %}"
    assert turn_end(tokenizer) == EOS
    tokenizer.chat_template = None
    assert turn_end(tokenizer) is None


def test_a_template_that_cannot_write_an_exchange_is_said(make_base, tokenizer):
    tokenizer.chat_template = "{{ raise_exception('a system text is wanted') }}"
    assert turn_end(tokenizer) is None
    notices = align_generation(make_base(), tokenizer)
    assert sum("cannot write a question and an answer" in n and "a system text is wanted" in n for n in notices) == 1


def test_b19_saved_generation_config_stops_at_the_turn_end(make_base, tokenizer, tmp_path):
    base = make_base()
    assert base.generation_config.eos_token_id == EOS
    notices = align_generation(base, tokenizer)
    assert any("'<|im_end|>' (260)" in notice for notice in notices)
    assert stop_tokens(tokenizer, base) == (IM_END, EOS)
    base.save_pretrained(tmp_path)
    saved = GenerationConfig.from_pretrained(tmp_path)
    assert set(saved.eos_token_id) == {IM_END, EOS}
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert tokenizer.eos_token_id in reloaded.config.eos_token_id
    assert set(reloaded.config.eos_token_id) == {IM_END, EOS}
    assert align_generation(reloaded, tokenizer) == []


def test_b104_sampling_settings_without_sampling_are_dropped_and_the_save_succeeds(
    make_folder, recipe, shape, tmp_path
):
    folder = make_folder()
    (folder / "generation_config.json").write_text(
        '{"do_sample": false, "temperature": 0.9, "top_p": 0.5, "eos_token_id": 257}'
    )
    model = load_model(recipe(folder), "cpu", "fp32", shape=shape)
    assert any("temperature=0.9, top_p=0.5" in notice for notice in model.notices)
    model.base.save_pretrained(tmp_path / "saved")
    saved = GenerationConfig.from_pretrained(tmp_path / "saved")
    assert saved.temperature in (None, 1.0)


def test_b104_other_invalid_settings_are_dropped_whole_but_the_stops_stay(make_base, tokenizer, tmp_path):
    base = make_base()
    base.generation_config.num_return_sequences = 3
    notices = align_generation(base, tokenizer)
    assert any("num_return_sequences" in notice for notice in notices)
    base.save_pretrained(tmp_path)
    assert set(GenerationConfig.from_pretrained(tmp_path).eos_token_id) == {IM_END, EOS}


def test_b21_identical_rows_of_chat_tokens_are_named(make_base, tokenizer):
    base = make_base()
    assert untrained_tokens(base, tokenizer, [IM_START, IM_END]) == []
    with torch.no_grad():
        for matrix in (base.get_input_embeddings().weight, base.get_output_embeddings().weight):
            matrix[IM_END] = matrix[300]
    notices = untrained_tokens(base, tokenizer, [IM_START, IM_END])
    assert len(notices) == 2
    assert "'<|im_end|>'" in notices[0]
    assert "'<|im_start|>'" not in notices[0]
    assert "embedding" in notices[0]
    assert "head" in notices[1]


def test_b21_zero_rows_are_named_and_the_warning_comes_with_loading(make_folder, tokenizer, recipe, shape):
    folder = make_folder()
    base = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        base.get_input_embeddings().weight[IM_START] = 0
    base.save_pretrained(folder)

    def warned(**sections):
        model = load_model(recipe(folder, **sections), "cpu", "fp32", shape=shape)
        return any("never trained" in notice and "im_start" in notice for notice in model.notices)

    assert warned(adapter={"kind": "lora"})
    assert not warned(adapter={"kind": "lora"}, data={"template": "alpaca"})
    assert not warned(adapter={"kind": "lora", "targets": "q_proj,embed_tokens,lm_head"})
    assert not warned()
