"""Compares training in one process with Hugging Face's GPT-2, nanoGPT, megatron-core and a bare loop.

    python -m benchmarks.single [--quick] [--only PART ...] > benchmarks/results/single.md

Prints the tables of ``results/single.md``, one module of this package each:

- speed: rate of a training step against every peer, in fp32 and bf16, and the goals beside what was measured;
- memory: peak resident memory of each side;
- settings: what the allocator's settings bring that the launcher makes;
- waiting: how long threads without work spin before they sleep;
- attention: the fused kernel against two batched matrix products, by type, length and dropout.

Hugging Face's side needs transformers (``pip install -c constraints.txt transformers``), megatron-core's needs it on
the path (``pip install --no-deps --target FOLDER megatron-core`` and ``PYTHONPATH=FOLDER``); without them they are left
out. A sample during which something else used more than a twentieth of the cores is dropped. On two quiet cores
everything takes about fourteen minutes, and ``--quick``, with fewer samples, about five.
"""

from __future__ import annotations

from benchmarks.single import attention, memory, settings, speed, waiting
from benchmarks.support.command import run

PARTS = {
    "speed": speed.report,
    "memory": memory.report,
    "settings": settings.report,
    "waiting": waiting.report,
    "attention": attention.report,
}

if __name__ == "__main__":
    run("single", "One process", __doc__ or "", PARTS)
