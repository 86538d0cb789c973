"""Generating and scoring tokens, with a model that may be split.

``tokens`` runs one pass a token, ``sampling`` chooses them, ``scoring`` tells how likely given ones are.

Imports: contracts, errors, runtime.
"""

from megatron_run_engine.runtime.generation.sampling import Sampling, choose_tokens
from megatron_run_engine.runtime.generation.scoring import Score, Window, score, text_windows
from megatron_run_engine.runtime.generation.tokens import Generation, Network, TextTokens

__all__ = [
    "Generation",
    "Network",
    "Sampling",
    "Score",
    "TextTokens",
    "Window",
    "choose_tokens",
    "score",
    "text_windows",
]
