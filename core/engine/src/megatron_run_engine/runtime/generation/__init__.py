"""Generating tokens, with a model that may be split: ``tokens`` (one pass a token), ``sampling`` (choosing them).

Imports: contracts, errors, runtime.
"""

from megatron_run_engine.runtime.generation.sampling import Sampling, choose_tokens
from megatron_run_engine.runtime.generation.tokens import Generation, Network, TextTokens

__all__ = ["Generation", "Network", "Sampling", "TextTokens", "choose_tokens"]
