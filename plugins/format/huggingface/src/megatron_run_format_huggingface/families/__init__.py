"""Every family that has a counterpart here. An export takes the first that fits the model."""

from __future__ import annotations

from megatron_run_format_huggingface.families.deepseek import DEEPSEEK_V2, DEEPSEEK_V3
from megatron_run_format_huggingface.families.gemma import GEMMA2, GEMMA3
from megatron_run_format_huggingface.families.gpt2 import GPT2
from megatron_run_format_huggingface.families.gpt_neox import GPT_NEOX
from megatron_run_format_huggingface.families.granite import GRANITE
from megatron_run_format_huggingface.families.llama import LLAMA
from megatron_run_format_huggingface.families.mistral import MISTRAL
from megatron_run_format_huggingface.families.mixtral import MIXTRAL
from megatron_run_format_huggingface.families.olmo2 import OLMO2
from megatron_run_format_huggingface.families.phi3 import PHI3
from megatron_run_format_huggingface.families.qwen import QWEN2, QWEN3, QWEN3_MOE
from megatron_run_format_huggingface.families.smollm3 import SMOLLM3
from megatron_run_format_huggingface.families.stablelm import STABLELM
from megatron_run_format_huggingface.families.starcoder2 import STARCODER2

_LLAMAS = (LLAMA, MISTRAL, QWEN2, QWEN3, GEMMA2, GEMMA3, PHI3, OLMO2, SMOLLM3, GRANITE, STABLELM)
_ALL = (GPT2, *_LLAMAS, GPT_NEOX, STARCODER2, MIXTRAL, QWEN3_MOE, DEEPSEEK_V2, DEEPSEEK_V3)
#: By ``model_type``.
FAMILIES = {family.model_type: family for family in _ALL}
