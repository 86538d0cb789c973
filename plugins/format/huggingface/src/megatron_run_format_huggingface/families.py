"""Every family that has a counterpart here. An export takes the first that fits the model."""

from __future__ import annotations

from megatron_run_format_huggingface.gpt2 import GPT2
from megatron_run_format_huggingface.llama import LLAMA
from megatron_run_format_huggingface.mistral import MISTRAL
from megatron_run_format_huggingface.qwen import QWEN2, QWEN3

#: By ``model_type``.
FAMILIES = {family.model_type: family for family in (GPT2, LLAMA, MISTRAL, QWEN2, QWEN3)}
