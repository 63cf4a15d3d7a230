"""Chat templates in the published forms of several families, and a tiny byte-level tokenizer to render them with.

Cut down to what matters for spans: headers, ends of turns, trimming, default system texts, turns that render
differently when they are last.
"""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
DEFAULT_SYSTEM = (
    "{% for m in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TOOLS = (
    "{% if tools %}{{ '<|im_start|>system\nTools: ' + (tools | tojson) + '<|im_end|>\n' }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] }}"
    "{% if m.tool_calls %}{% for c in m.tool_calls %}"
    "{{ '\n<tool_call>\n' + (c.function | tojson) + '\n</tool_call>' }}{% endfor %}{% endif %}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = (
    "{% for m in messages %}{% set content = '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n'"
    " + m['content'] | trim + '<|eot_id|>' %}"
    "{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
LLAMA31 = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] | trim %}"
    "{% set messages = messages[1:] %}{% else %}{% set system = '' %}{% endif %}"
    "{{ '<|start_header_id|>system<|end_header_id|>\n\nCutting Knowledge Date: December 2023\n\n' }}"
    "{{ system + '<|eot_id|>' }}"
    "{% for m in messages %}{% if 'tool_calls' in m %}{% set f = m.tool_calls[0].function %}"
    '{{ \'<|start_header_id|>assistant<|end_header_id|>\n\n{"name": "\' + f.name + \'", "parameters": \' }}'
    "{{ f.arguments | tojson }}{{ '}<|eot_id|>' }}{% else %}"
    "{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' + m['content'] | trim + '<|eot_id|>' }}"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
MISTRAL_BODY = (
    "{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] + '\n\n' %}"
    "{% set rest = messages[1:] %}{% else %}{% set system = '' %}{% set rest = messages %}{% endif %}{{ bos_token }}"
    "{% for m in rest %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if m['role'] == 'user' %}{{ '[INST]SPACE' + (system if WHERE else '') + m['content'] + 'SPACE[/INST]' }}"
    "{% else %}{{ 'SPACE' + m['content'] | trim + eos_token }}{% endif %}{% endfor %}"
)
MISTRAL = MISTRAL_BODY.replace("SPACE", "").replace("WHERE", "loop.last or loop.index0 == rest | length - 2")
"""No spaces; the system text stands in the last user turn, so that no prefix renders as a prefix."""
MISTRAL_SPACED = MISTRAL_BODY.replace("SPACE", " ").replace("WHERE", "loop.first")
QWEN3 = (
    "{% for m in messages %}{% if m.role != 'assistant' %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% else %}"
    "{% set ns = namespace(content=m.content, thought='') %}"
    "{% if m.reasoning_content is string %}{% set ns.thought = m.reasoning_content %}"
    "{% elif '</think>' in m.content %}"
    "{% set ns.thought = m.content.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
    "{% set ns.content = m.content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{{ '<|im_start|>assistant\n' }}{% if loop.last %}{{ '<think>\n' + ns.thought + '\n</think>\n\n' }}{% endif %}"
    "{{ ns.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% set role = 'model' if m['role'] == 'assistant' else m['role'] %}"
    "{{ '<start_of_turn>' + role + '\n' + m['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
PHI3 = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + m['content'] + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"
)
LAST_ONLY = (
    "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% else %}{{ eos_token }}{% endif %}"
)
MARKED = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] }}{% endgeneration %}{% else %}{{ m['content'] }}{% endif %}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
ENDS = {
    CHATML: "<|im_end|>",
    DEFAULT_SYSTEM: "<|im_end|>",
    LLAMA3: "<|eot_id|>",
    LLAMA31: "<|eot_id|>",
    MISTRAL: "</s>",
    MISTRAL_SPACED: "</s>",
    QWEN3: "<|im_end|>",
    GEMMA: "<end_of_turn>",
    PHI3: "<|end|>",
    MARKED: "<|im_end|>",
}
SPECIAL = [
    "<s>",
    "</s>",
    "<pad>",
    "<|im_start|>",
    "<|im_end|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "[INST]",
    "[/INST]",
    "<start_of_turn>",
    "<end_of_turn>",
    "<|user|>",
    "<|assistant|>",
    "<|system|>",
    "<|end|>",
]
PLAIN_ADDED = ("<think>", "</think>", "<tool_call>", "</tool_call>")
MERGED = ("Hello", "Ġworld", "ĊĊ", "Ġthe", "Four")


def tiny_tokenizer(
    template: str | None = None, bos: bool = False, eos: str | None = "</s>", pad: str | None = None
) -> PreTrainedTokenizerFast:
    """Byte-level BPE with a few merged words, two newlines among them. `bos`: encoding puts <s> before a text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate(alphabet)}
    merges = []
    for word in MERGED:
        for end in range(2, len(word) + 1):
            pair = (word[: end - 1], word[end - 1])
            if word[:end] not in vocabulary:
                vocabulary[word[:end]] = len(vocabulary)
                merges.append(pair)
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    inner.add_tokens([AddedToken(token, special=False, normalized=False) for token in PLAIN_ADDED])
    if bos:
        number = inner.token_to_id("<s>")
        inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", number)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner,
        bos_token="<s>",
        eos_token=eos,
        pad_token=pad,
        extra_special_tokens=[token for token in SPECIAL if token not in ("<s>", eos, pad)],
    )
    tokenizer.chat_template = template
    return tokenizer


def render(template: Any, record: dict[str, Any], where: str, tokenizer: Any, train_on: str = "assistant") -> Any:
    """One record through a template bound to a tokenizer."""
    from finetune.data.rendering import Renderer

    return Renderer(template, tokenizer, train_on).render(record, where)
