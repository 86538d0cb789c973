"""Folders that ``transformers`` loads: ``config.json`` beside safetensors, of GPT-2 and Llama.

Reading order: ``family`` (what a family of models says of itself), ``gpt2`` and ``llama`` (the two), ``files`` (their
safetensors), ``importing`` and ``exporting`` (the two ways). Tokenizers are in neither way: they are no part of a model
here.
"""

from megatron_run_engine.formats.huggingface.exporting import write
from megatron_run_engine.formats.huggingface.importing import read, recognises

__all__ = ["read", "recognises", "write"]
