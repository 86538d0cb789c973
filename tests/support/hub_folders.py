"""Folders of the Hub's kind, made with transformers: small chat models of families that people fine-tune."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

#: The tools of a conversation, as JSON schemas.
TOOLS: Sequence[Mapping[str, Any]] = (
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather at a place's centre",
            "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
        },
    },
)
#: The system prompt of every other conversation.
SYSTEM = "You are brief & kind."
_SYSTEM = {"role": "system", "content": SYSTEM}
_ASKED = [
    {"role": "user", "content": "Is it raining in Köln?"},
    {"role": "assistant", "content": "Yes, take an umbrella."},
]
_CALL = {"type": "function", "function": {"name": "weather", "arguments": {"place": "Köln"}}}
_CALLED = [
    _SYSTEM,
    {"role": "user", "content": "Is it raining in Köln?"},
    {"role": "assistant", "content": "", "tool_calls": [_CALL]},
    {"role": "tool", "name": "weather", "content": '{"rain": true}'},
    {"role": "assistant", "content": "Yes, take an umbrella."},
]
_TEXTS = (
    ("What is a fox?", "A fox is an animal.\nIt is quick and brown."),
    ("And a dog?", "A dog is lazy: the fox jumps over it 🦊."),
    ("Who are you?", "I am a small model, 日本語 too."),
)


class Family(NamedTuple):
    """A model's class and sizes, the special tokens of its tokenizer, where its answers end, and its template.

    ``marked`` spaces are those of SentencePiece, with bytes for what has no token; else bytes are tokens. ``calls``
    says that the template knows messages that call tools, and those that answer.
    """

    config: str
    sizes: Mapping[str, Any]
    special: Mapping[str, str | None]
    ends: Sequence[str]
    template: str
    marked: bool = False
    calls: bool = True


_LLAMA = """{{- bos_token }}{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}{%- set messages = messages[1:] %}
{%- else %}{%- set system_message = "" %}{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{{- "Today Date: " + (strftime_now("%d %b %Y") if strftime_now is defined else "26 Jul 2024") + "\\n\\n" }}
{%- if tools is not none %}{%- for t in tools %}{{- t | tojson(indent=4) }}{{- "\\n\\n" }}{%- endfor %}{%- endif %}
{{- system_message }}{{- "<|eot_id|>" }}
{%- for message in messages %}
    {%- if message.tool_calls %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + call.name + '", "parameters": ' }}
        {{- call.arguments | tojson }}{{- "}<|eot_id|>" }}
    {%- else %}
        {%- set role = 'ipython' if message.role == 'tool' else message.role %}
        {{- '<|start_header_id|>' + role + '<|end_header_id|>\\n\\n' + message['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
"""
_GEMMA = """{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- set prefix = messages[0]['content'] + '\\n\\n' -%}{%- set turns = messages[1:] -%}
{%- else -%}{%- set prefix = "" -%}{%- set turns = messages -%}{%- endif -%}
{%- if tools %}{%- set prefix = prefix + 'Tools: ' + (tools | tojson) + '\\n' %}{%- endif -%}
{%- for message in turns -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception("Conversation roles must alternate user/assistant/user/assistant/...") }}
    {%- endif -%}
    {%- set role = "model" if message['role'] == 'assistant' else message['role'] -%}
    {{ '<start_of_turn>' + role + '\\n' + (prefix if loop.first else "") }}
    {{- message['content'] | trim }}{{ '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\\n' }}{%- endif -%}
"""
_QWEN = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- "# Tools\\n\\n<tools>" }}
    {%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == "user" or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content }}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson }}{{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
_PHI = """{{ bos_token }}{{ '<|system|>Today is ' + strftime_now('%A') + '.' }}
{%- if tools %}{{ '<|tool|>' + (tools | tojson) + '<|/tool|>' }}{% endif %}{{ '<|end|>' }}
{%- for message in messages %}
    {%- if message.tool_calls %}
        {{- '<|assistant|><|tool_call|>' + (message.tool_calls | tojson) + '<|/tool_call|><|end|>' }}
    {%- else %}{{- '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% else %}{{ eos_token }}{% endif %}
"""
#: Families by the names of their models: dates (llama, phi), no begin token (qwen), templates that refuse (gemma), that
#: end a conversation once more (phi).
FAMILIES: Mapping[str, Family] = {
    "llama": Family(
        "LlamaConfig",
        {},
        {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>", "pad_token": "<|finetune_right_pad_id|>"},
        ("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"),
        _LLAMA,
    ),
    "gemma": Family(
        "Gemma3TextConfig",
        {"head_dim": 8, "sliding_window": 16, "query_pre_attn_scalar": 8},
        {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>"},
        ("<eos>", "<end_of_turn>"),
        _GEMMA,
        marked=True,
        calls=False,
    ),
    "qwen": Family(
        "Qwen3Config",
        {"head_dim": 8, "tie_word_embeddings": True},
        {"bos_token": None, "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
        ("<|im_end|>", "<|endoftext|>"),
        _QWEN,
    ),
    "phi": Family(
        "Phi3Config",
        {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5, "rope_theta": 10000.0}},
        {"bos_token": "<s>", "eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>", "unk_token": "<|endoftext|>"},
        ("<|endoftext|>", "<|end|>"),
        _PHI,
    ),
}
#: What the templates write beside the special tokens that have a part.
_CONTROL: Mapping[str, Sequence[str]] = {
    "llama": ("<|start_header_id|>", "<|end_header_id|>"),
    "gemma": ("<start_of_turn>",),
    "qwen": ("<|im_start|>", "<tool_call>", "</tool_call>"),
    "phi": ("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|/tool|>", "<|tool_call|>", "<|/tool_call|>"),
}


def conversations(name: str) -> list[dict[str, Any]]:
    """Lines for ``data=instruct`` that the family's template renders: several turns, and tools."""
    turns: list[dict[str, Any]] = []
    lines: list[dict[str, Any]] = []
    for question, answer in _TEXTS:
        turns = [*turns, {"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        lines.append({"messages": turns})
    lines.append({"messages": _CALLED if FAMILIES[name].calls else _ASKED, "tools": TOOLS})
    with_system = [{**line, "messages": [_SYSTEM, *line["messages"]]} for line in lines[: len(_TEXTS)]]
    return [{**line, "number": number} for number in range(4) for line in (*with_system, *lines)]


def hub_tokenizer(name: str) -> Any:
    """The tokenizer of the family ``name`` with its template, as transformers has it."""
    import transformers

    family = FAMILIES[name]
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=_tokenizer(name),
        chat_template=family.template,
        clean_up_tokenization_spaces=False,
        **family.special,
    )


def hub_folder(name: str, folder: Path, length: int = 512) -> Path:
    """Write a random model of the family ``name`` that reads ``length`` tokens, as its makers publish theirs."""
    import torch
    import transformers

    family, wrapped = FAMILIES[name], hub_tokenizer(name)
    ends = wrapped.convert_tokens_to_ids(list(family.ends))
    sizes = {
        "vocab_size": len(wrapped),
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 48,
        "max_position_embeddings": length,
        "initializer_range": 0.2,
        "bos_token_id": wrapped.bos_token_id,
        "eos_token_id": ends,
        "pad_token_id": wrapped.pad_token_id,
        **family.sizes,
    }
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, family.config)(**sizes))
    model.generation_config = transformers.GenerationConfig(
        bos_token_id=wrapped.bos_token_id, eos_token_id=ends, do_sample=True, temperature=0.6, top_p=0.9
    )
    model.save_pretrained(folder)
    wrapped.save_pretrained(folder)
    return folder


def _tokenizer(name: str) -> Tokenizer:
    """A tokenizer that has learned the conversations of ``name``, and begins a text where the family does."""
    family = FAMILIES[name]
    special = list(dict.fromkeys([*filter(None, family.special.values()), *family.ends, *_CONTROL[name]]))
    texts = [json.dumps(line, ensure_ascii=False) for line in conversations(name)]
    made = Tokenizer(models.BPE(unk_token=family.special.get("unk_token"), byte_fallback=family.marked))
    if family.marked:
        made.normalizer = normalizers.Replace(" ", "▁")
        made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
        alphabet = [f"<0x{byte:02X}>" for byte in range(256)]
        trainer = trainers.BpeTrainer(
            vocab_size=450, special_tokens=[*special, *alphabet], limit_alphabet=60, show_progress=False
        )
    else:
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=400,
            special_tokens=special,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
    made.train_from_iterator(texts, trainer)
    if family.marked:  # bytes are plain tokens, which text never names
        state = json.loads(made.to_str())
        state["added_tokens"] = [each for each in state["added_tokens"] if each["content"] in special]
        made = Tokenizer.from_str(json.dumps(state))
    made.add_special_tokens([AddedToken(text, normalized=False) for text in special])
    if bos := family.special["bos_token"]:
        made.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=None, special_tokens=[(bos, made.token_to_id(bos))]
        )
    return made
