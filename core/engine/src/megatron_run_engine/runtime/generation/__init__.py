"""Generating and scoring tokens, with a model that may be split.

``tokens`` runs one pass a token and chooses the next one, ``scoring`` tells how likely given ones are.

Imports: contracts, errors, runtime.
"""

from megatron_run_engine.runtime.generation.scoring import Score, Window, score, text_windows
from megatron_run_engine.runtime.generation.tokens import Generation, Network, Sampling, TextTokens, choose_tokens

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
