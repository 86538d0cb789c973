"""The families that have a counterpart here: a row each."""

from megatron_run_engine.formats.huggingface.gpt2 import GPT2
from megatron_run_engine.formats.huggingface.llama import LLAMA

FAMILIES = {family.model_type: family for family in (GPT2, LLAMA)}
