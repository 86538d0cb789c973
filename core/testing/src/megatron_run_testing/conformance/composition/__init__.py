"""Does what is learned depend on how it is computed? Random valid configurations, each against the single process.

A composition draws what is learned (network, batch, decay, clipping, rule) and how it is carried out (ranks, schedule,
layers, ZeRO-1, recomputation, capture, a resume on other ranks). Losses, gradient norms, evaluations and all final
weights are compared in fp32, tightly enough that a weight decay of 0.051 for 0.05 is seen. What differs is made simpler
until nothing more can be left out, and told as commands to type.
"""

from megatron_run_testing.conformance.composition.campaign import Difference, Findings, check_composition, search

__all__ = ["Difference", "Findings", "check_composition", "search"]
