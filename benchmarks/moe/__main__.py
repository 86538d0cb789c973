"""Compares a layer of experts with a naive loop over them, Hugging Face's Mixtral block and a dense layer.

    python -m benchmarks.moe [--quick] > benchmarks/results/moe.md

Prints the tables of ``results/moe.md``: how long a forward and backward takes on each side, and the goals beside what
was measured. Hugging Face's sides need transformers (``pip install -c constraints.txt transformers``); without it they
are left out. A sample during which something else used more than a twentieth of the cores is dropped. On two quiet
cores this takes about two minutes, and ``--quick``, with fewer samples, about one.
"""

from __future__ import annotations

from benchmarks.moe.speed import report
from benchmarks.support.command import run

if __name__ == "__main__":
    run("moe", "Mixture of experts", __doc__ or "", report)
