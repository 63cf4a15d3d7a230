"""Answers from a model: batched generation through transformers, with the tokenizer's own stop tokens.

Prompts are token ids, exactly as in training, and are padded on the left here so that all answers start together.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import GenerationConfig

from finetune.config.schema import GenerateSection
from finetune.contracts import Model
from finetune.errors import InputError
from finetune.kernels.precision import compute
from finetune.models.decoder import learned_positions
from finetune.models.load import stop_tokens


def answer(
    model: Model, prompts: Sequence[Sequence[int]], settings: GenerateSection, precision: str, seed: int = 0
) -> list[str]:
    """The answer to each prompt as text, without special tokens; temperature 0 takes the likeliest token each time.

    Draws from a generator state of its own, so training's randomness is untouched.
    """
    if not prompts:
        return []
    width = max(len(prompt) for prompt in prompts)
    limit = learned_positions(model)
    if limit is not None:
        if width >= limit:
            raise InputError(f"a prompt of {width} tokens leaves no room in {limit} positions", "prompt", "shorten it")
        settings = settings.model_copy(update={"max_tokens": min(settings.max_tokens, limit - width)})
    device = model.device
    pad = model.tokenizer.pad_token_id
    ids_BS = torch.tensor([[pad] * (width - len(prompt)) + list(prompt) for prompt in prompts], device=device)
    mask_BS = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=device)
    was_training = model.module.training
    model.module.eval()
    cuda = [device] if device.type == "cuda" else []
    try:
        with torch.random.fork_rng(cuda), torch.no_grad(), compute(device, precision):
            torch.manual_seed(seed)
            output_BS = model.module.generate(
                input_ids=ids_BS, attention_mask=mask_BS, generation_config=_settings(model, settings, pad)
            )
    finally:
        model.module.train(was_training)
    return [model.tokenizer.decode(row[width:], skip_special_tokens=True).strip() for row in output_BS.tolist()]


def _settings(model: Model, settings: GenerateSection, pad: int) -> GenerationConfig:
    sampling = (
        {"do_sample": True, "temperature": settings.temperature} if settings.temperature > 0 else {"do_sample": False}
    )
    return GenerationConfig(
        max_new_tokens=settings.max_tokens,
        eos_token_id=stop_tokens(model.tokenizer, model.base),
        pad_token_id=pad,
        use_cache=True,
        **sampling,
    )
