"""A GPT-2 in plain PyTorch, written for this benchmark in the manner of nanoGPT.

The names are GPT-2's; everything is [b, s, h].
"""

from __future__ import annotations

import re

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.single.loop import PlainLoop
from benchmarks.single.model import Precision, Weights
from benchmarks.support.shape import Shape

#: The canonical name of a module -> GPT-2's. Query, key and value are one: ``attn.c_attn``.
NAMES = {
    "embedding.word": "wte",
    "embedding.position": "wpe",
    "attention.qkv": "attn.c_attn",
    "attention.qkv.norm": "ln_1",
    "attention.output": "attn.c_proj",
    "mlp.input.norm": "ln_2",
    "mlp.input.up": "mlp.c_fc",
    "mlp.output": "mlp.c_proj",
    "final_norm": "ln_f",
}
_LAYER = re.compile(r"layers\.(\d+)\.(.*)\.(weight|bias)")


def gpt2_weights(weights: Weights) -> dict[str, Tensor]:
    """Whole tensors by canonical name -> by GPT-2's: matrices [out, in]; query, key and value one below the other."""
    renamed: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        if ".qkv.key." in name or ".qkv.value." in name:
            continue
        if ".qkv.query." in name:
            parts = [weights[name.replace("query", part)] for part in ("query", "key", "value")]
            renamed[_their_name(name.replace(".query", ""))] = torch.cat(parts)
        else:
            renamed[_their_name(name)] = tensor
    return renamed


def _their_name(name: str) -> str:
    if match := _LAYER.fullmatch(name):
        layer, module, kind = match.groups()
        return f"h.{layer}.{NAMES[module]}.{kind}"
    module, _, kind = name.rpartition(".")
    return f"{NAMES[module]}.{kind}"


class _Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.c_attn = nn.Linear(shape.hidden, 3 * shape.hidden)
        self.c_proj = nn.Linear(shape.hidden, shape.hidden)

    def forward(self, x: Tensor) -> Tensor:
        """[b, s, h] -> [b, s, h]."""
        b, s, h = x.shape
        query, key, value = (
            part.view(b, s, self.heads, h // self.heads).transpose(1, 2) for part in self.c_attn(x).split(h, dim=2)
        )  # each [b, n, s, d]
        y = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        result: Tensor = self.c_proj(y.transpose(1, 2).contiguous().view(b, s, h))
        return result


class _Mlp(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.c_fc, self.c_proj = nn.Linear(shape.hidden, 4 * shape.hidden), nn.Linear(4 * shape.hidden, shape.hidden)

    def forward(self, x: Tensor) -> Tensor:
        """[b, s, h] -> [b, s, h]."""
        result: Tensor = self.c_proj(F.gelu(self.c_fc(x)))
        return result


class _Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(shape.hidden), nn.LayerNorm(shape.hidden)
        self.attn, self.mlp = _Attention(shape), _Mlp(shape)

    def forward(self, x: Tensor) -> Tensor:
        """[b, s, h] -> [b, s, h]."""
        x = x + self.attn(self.ln_1(x))
        result: Tensor = x + self.mlp(self.ln_2(x))
        return result


class NanoGpt(nn.Module):
    """Tokens and labels, both [b, s], to their mean loss; the output layer is the word embedding."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(shape.vocab, shape.hidden), nn.Embedding(shape.sequence, shape.hidden)
        self.h = nn.ModuleList(_Block(shape) for _ in range(shape.layers))
        self.ln_f = nn.LayerNorm(shape.hidden)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """Run all layers."""
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.h:
            x = block(x)
        logits = F.linear(self.ln_f(x), self.wte.weight)
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), labels.flatten())


def nanogpt(
    shape: Shape, weights: Weights | None, precision: Precision, device: str = "cpu", *, compiled: bool = False
) -> PlainLoop:
    """The network, with ``weights`` by canonical name if there are any, and its loop."""
    model = NanoGpt(shape).to(device)
    if weights is not None:
        model.load_state_dict(gpt2_weights(weights))
    return PlainLoop(model, torch.compile(model) if compiled else model, precision)
