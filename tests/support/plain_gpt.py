"""GPT written out in plain torch: the reference for the model, sharing no code with it.

Weights are a dictionary by canonical name; everything is [b, s, h], in whatever dtype the weights have.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.support import plain_moe

Weights = dict[str, Tensor]


def identity(x: Tensor) -> Tensor:
    return x


def logits(
    weights: Weights,
    tokens: Tensor,
    options: Any,
    dropout: Callable[[Tensor], Tensor] = identity,
    mixed: list[plain_moe.Mixed] | None = None,
) -> Tensor:
    """Tokens [b, s] -> [b, s, v]; ``dropout`` stands for what acts on the embedding and the residual additions.

    What layers of experts find is appended to ``mixed``.
    """
    x = weights["embedding.word.weight"][tokens]
    if options.position == "learned":
        x = x + weights["embedding.position.weight"][: tokens.shape[1]]
    x = dropout(x)
    for layer in range(options.num_layers):
        own = {name.removeprefix(f"layers.{layer}."): w for name, w in weights.items() if f"layers.{layer}." in name}
        x = x + dropout(attention(own, norm(own, "attention.qkv.norm", x, options), options))
        if "moe.router.weight" in own:
            mixture = {name.removeprefix("moe."): w for name, w in own.items()}
            found = plain_moe.mixture(mixture, norm(own, "moe.norm", x, options), options)
            x = x + dropout(found.out)
            if mixed is not None:
                mixed.append(found)
        else:
            x = x + dropout(mlp(own, norm(own, "mlp.input.norm", x, options), options))
    x = norm(weights, "final_norm", x, options)
    return x @ weights["embedding.word.weight" if options.tie_embeddings else "output.weight"].T


def loss(
    weights: Weights,
    tokens: Tensor,
    labels: Tensor,
    mask: Tensor,
    options: Any,
    mixed: list[plain_moe.Mixed] | None = None,
) -> Tensor:
    """Summed over the tokens that count; ``mixed`` as for :func:`logits`."""
    probabilities = torch.softmax(logits(weights, tokens, options, mixed=mixed), dim=-1)
    return -(probabilities.gather(-1, labels[..., None])[..., 0].log() * mask).sum()


def linear(weights: Weights, name: str, x: Tensor) -> Tensor:
    y = x @ weights[f"{name}.weight"].T
    return y + weights[f"{name}.bias"] if f"{name}.bias" in weights else y


def norm(weights: Weights, name: str, x: Tensor, options: Any) -> Tensor:
    if options.norm == "rmsnorm":
        return x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * weights[f"{name}.weight"]
    centred = x - x.mean(-1, keepdim=True)
    scaled = centred / torch.sqrt(centred.pow(2).mean(-1, keepdim=True) + 1e-5)
    return scaled * weights[f"{name}.weight"] + weights[f"{name}.bias"]


def attention(weights: Weights, x: Tensor, options: Any) -> Tensor:
    """One head at a time."""
    size = options.hidden_size // options.num_heads
    share = options.num_heads // (options.num_kv_heads or options.num_heads)
    query, key, value = (linear(weights, f"attention.qkv.{name}", x) for name in ("query", "key", "value"))
    visible = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
    heads = []
    for head in range(options.num_heads):
        mine, theirs = slice(head * size, (head + 1) * size), slice(head // share * size, (head // share + 1) * size)
        q, k, v = query[..., mine], key[..., theirs], value[..., theirs]
        if options.position == "rope":
            q, k = rotate(q, options.rope_theta), rotate(k, options.rope_theta)
        scores = q @ k.transpose(1, 2) / math.sqrt(size)
        heads.append(torch.softmax(scores.masked_fill(~visible, float("-inf")), dim=-1) @ v)
    return linear(weights, "attention.output", torch.cat(heads, dim=-1))


def rotate(x: Tensor, theta: float) -> Tensor:
    """Multiply the pair (x[j], x[j + d/2]), read as a complex number, by exp(i * position * theta^(-2j/d))."""
    half = x.shape[-1] // 2
    angles = torch.outer(torch.arange(x.shape[1], dtype=x.dtype), theta ** -(torch.arange(half, dtype=x.dtype) / half))
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((turned.real, turned.imag), dim=-1)


def mlp(weights: Weights, x: Tensor, options: Any) -> Tensor:
    up = linear(weights, "mlp.input.up", x)
    if options.activation == "swiglu":
        gate = linear(weights, "mlp.input.gate", x)
        inner = gate * torch.sigmoid(gate) * up
    elif options.activation == "gelu_tanh":
        inner = 0.5 * up * (1 + torch.tanh(math.sqrt(2 / math.pi) * (up + 0.044715 * up**3)))
    else:
        inner = 0.5 * up * (1 + torch.erf(up / math.sqrt(2)))
    return linear(weights, "mlp.output", inner)


def leaves(weights: Weights) -> Weights:
    """Copies that collect gradients."""
    return {name: weight.clone().requires_grad_() for name, weight in weights.items()}
