"""Compares generation with transformers' `generate`, both with caches: the same weights, prompts and greedy tokens.

    python -m benchmarks.generate [--quick] > benchmarks/results/generate.md

The sides take turns, and each turn of one is divided by the turn of the other beside it, so that what else runs on the
machine slows both: quote the median of these ratios, not the times. Times are the processor's, of one thread. Needs
transformers.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from benchmarks.support.command import run
from benchmarks.support.report import table
from megatron_run_inference import LoadedModel, load

#: Tokens that are written, and those of the prompts.
NEW, PROMPTS = 64, (32, 448)
BATCHES = (1, 4)
POSITIONS = 512
COLUMNS = ("model", "batch", "prompt", "ours, tokens/s", "theirs, tokens/s", "our speed over theirs", "goal 1.0")


def models(size: int) -> dict[str, Any]:
    """A GPT-2 and a Llama of transformers with random weights, of ``size`` features."""
    heads = size // 64
    ends: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None}
    gpt2 = GPT2Config(n_layer=6, n_embd=size, n_head=heads, vocab_size=16384, n_positions=POSITIONS, **ends)
    llama = LlamaConfig(
        num_hidden_layers=6,
        hidden_size=size,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        intermediate_size=size * 8 // 3,
        vocab_size=16384,
        max_position_embeddings=POSITIONS,
        **ends,
    )
    return {"GPT-2": GPT2LMHeadModel(gpt2).eval(), "Llama": LlamaForCausalLM(llama).eval()}


def pairs(model: LoadedModel, peer: Any, prompts: torch.Tensor, runs: int) -> list[tuple[float, float]]:
    """Processor seconds of both sides, turn by turn, after an uncounted one. Raises ValueError for unequal tokens."""
    found = []
    rows = prompts.tolist()
    mask = torch.ones_like(prompts)
    for _ in range(runs + 1):
        start = time.process_time()
        texts = model.generate(rows, temperature=0, max_new_tokens=NEW)
        middle = time.process_time()
        with torch.inference_mode():
            tokens = peer.generate(
                prompts,
                attention_mask=mask,
                do_sample=False,
                max_new_tokens=NEW,
                min_new_tokens=NEW,
                eos_token_id=None,
                pad_token_id=0,
            )
        found.append((middle - start, time.process_time() - middle))
        if [list(text.tokens) for text in texts] != tokens[:, prompts.shape[1] :].tolist():
            raise ValueError("the two sides write different tokens")
    return found[1:]


def rows(size: int, runs: int) -> Iterator[tuple[object, ...]]:
    """A row of the table for each model, batch and prompt."""
    generator = torch.Generator().manual_seed(1)
    for name, peer in models(size).items():
        with tempfile.TemporaryDirectory() as folder:
            peer.save_pretrained(Path(folder))
            model = load(folder, device="cpu")
            for batch in BATCHES:
                for length in PROMPTS:
                    prompts = torch.randint(16384, (batch, length), generator=generator)
                    timed = pairs(model, peer, prompts, runs)
                    own, other = (statistics.median(side) for side in zip(*timed, strict=True))
                    ratio = statistics.median(b / a for a, b in timed)
                    speeds = (f"{batch * NEW / seconds:.0f}" for seconds in (own, other))
                    yield name, batch, length, *speeds, f"{ratio:.2f}", "yes" if ratio >= 1 else "no"


def report(*, quick: bool) -> Iterator[str]:
    """The table, and what it was measured with."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    size, runs = (256, 3) if quick else (512, 7)
    yield f"\n{NEW} new tokens, 6 layers of {size} features, {runs} pairs, one thread, fp32.\n"
    yield from table(COLUMNS, rows(size, runs))


if __name__ == "__main__":
    run("generate", "Generation", __doc__ or "", report)
