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
    x = weights["embedding.word.weight"][tokens] * options.embedding_scale
    if options.position == "learned":
        x = x + weights["embedding.position.weight"][: tokens.shape[1]]
    x = dropout(x)
    for layer in range(options.num_layers):
        own = {name.removeprefix(f"layers.{layer}."): w for name, w in weights.items() if f"layers.{layer}." in name}
        start = x
        found = attention(own, norm(own, "attention.qkv.norm", x, options), options, layer)
        x = x + options.residual_scale * dropout(norm(own, "attention_post_norm", found, options))
        if "moe.router.weight" in own:
            mixture = {name.removeprefix("moe."): w for name, w in own.items()}
            chosen = plain_moe.mixture(mixture, norm(own, "moe.norm", x, options), options)
            x = x + dropout(chosen.out)
            if mixed is not None:
                mixed.append(chosen)
        else:
            read = start if options.parallel_residual else x
            found = mlp(own, norm(own, "mlp.input.norm", read, options), options)
            x = x + options.residual_scale * dropout(norm(own, "feed_post_norm", found, options))
    x = norm(weights, "final_norm", x, options)
    found = x @ weights["embedding.word.weight" if options.tie_embeddings else "output.weight"].T
    return capped(options.logits_scale * found, options.logits_softcap)


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


def capped(x: Tensor, cap: float | None) -> Tensor:
    return x if cap is None else cap * torch.tanh(x / cap)


def norm(weights: Weights, name: str, x: Tensor, options: Any) -> Tensor:
    """X where the model has no such norm."""
    if f"{name}.weight" not in weights:
        return x
    weight = weights[f"{name}.weight"] + (1 if options.norm.kind.endswith("_1p") else 0)
    if options.norm.kind.startswith("rmsnorm"):
        return x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + options.norm.eps) * weight
    centred = x - x.mean(-1, keepdim=True)
    scaled = centred / torch.sqrt(centred.pow(2).mean(-1, keepdim=True) + options.norm.eps)
    return scaled * weight + weights[f"{name}.bias"]


def attention(weights: Weights, x: Tensor, options: Any, layer: int = 0) -> Tensor:
    """One head at a time."""
    size = options.head_size or options.hidden_size // options.num_heads
    windowed = options.attention.window is not None and in_layer(options.attention.window_pattern, layer)
    rotated = options.position == "rope" and in_layer(options.rope.pattern, layer)
    share = options.num_heads // (options.num_kv_heads or options.num_heads)
    query, key, value = (linear(weights, f"attention.qkv.{name}", x) for name in ("query", "key", "value"))
    if options.attention.qk_norm == "full":
        query = norm(weights, "attention.qk_norm.query", query, options)
        key = norm(weights, "attention.qk_norm.key", key, options)
    visible = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
    if windowed:
        for row in range(x.shape[1]):
            visible[row, : max(0, row + 1 - options.attention.window)] = False
    heads = []
    for head in range(options.num_heads):
        mine, theirs = slice(head * size, (head + 1) * size), slice(head // share * size, (head // share + 1) * size)
        q, k, v = query[..., mine], key[..., theirs], value[..., theirs]
        if options.attention.qk_norm == "head":
            q = norm(weights, "attention.qk_norm.query", q, options)
            k = norm(weights, "attention.qk_norm.key", k, options)
        if rotated:
            q, k = (rotate_part(each, options, local=windowed) for each in (q, k))
        scale = options.attention.scale or 1 / math.sqrt(size)
        scores = capped(scale * (q @ k.transpose(1, 2)), options.attention.softcap)
        heads.append(torch.softmax(scores.masked_fill(~visible, float("-inf")), dim=-1) @ v)
    return linear(weights, "attention.output", torch.cat(heads, dim=-1))


def in_layer(pattern: tuple[int, ...], layer: int) -> bool:
    return not pattern or pattern[layer % len(pattern)] == 1


def rotate_part(x: Tensor, options: Any, *, local: bool) -> Tensor:
    """The first features turn, the others stay."""
    size = int(x.shape[-1] * options.rope.fraction)
    theta, factor = options.rope.theta, 1.0
    if local and options.rope.window_theta is not None:
        return torch.cat((rotate(x[..., :size], options.rope.window_theta), x[..., size:]), dim=-1)
    speeds = [theta ** (-2 * pair / size) for pair in range(size // 2)]
    if options.rope.scaling == "linear":
        speeds = [speed / options.rope.factor for speed in speeds]
    if options.rope.scaling == "llama3":
        speeds = [llama3_speed(speed, options) for speed in speeds]
    if options.rope.scaling == "yarn":
        speeds = [yarn_speed(speed, pair, size, options) for pair, speed in enumerate(speeds)]
        factor = 0.1 * math.log(options.rope.factor) + 1
    if options.rope.scaling == "longrope":
        longer = x.shape[-2] > options.rope.original_length
        slower = options.rope.long_factors if longer else options.rope.short_factors
        speeds = [speed / each for speed, each in zip(speeds, slower, strict=True)]
        factor = math.sqrt(1 + math.log(options.rope.factor) / math.log(options.rope.original_length))
    turned = rotate(x[..., :size], theta, torch.tensor(speeds, dtype=x.dtype))
    return torch.cat((factor * turned, x[..., size:]), dim=-1)


def llama3_speed(speed: float, options: Any) -> float:
    """By the wavelength in tokens, as Meta's code says it."""
    wavelength, length = 2 * math.pi / speed, options.rope.original_length
    slow: float = speed / options.rope.factor
    if wavelength < length / options.rope.high_freq:
        return speed
    if wavelength > length / options.rope.low_freq:
        return slow
    smooth = (length / wavelength - options.rope.low_freq) / (options.rope.high_freq - options.rope.low_freq)
    mixed: float = (1 - smooth) * slow + smooth * speed
    return mixed


def yarn_speed(speed: float, pair: int, size: int, options: Any) -> float:
    """By the pair's place between the one that turns fast and the one that turns slowly, as YaRN's code says it."""

    def place(turns: float) -> float:
        return (
            size * math.log(options.rope.original_length / (turns * 2 * math.pi)) / (2 * math.log(options.rope.theta))
        )

    low = max(math.floor(place(options.rope.high_freq)), 0)
    high = min(math.ceil(place(options.rope.low_freq)), size - 1)
    ramp = min(max((pair - low) / (high - low if high != low else 0.001), 0), 1)
    mixed: float = speed / options.rope.factor * ramp + speed * (1 - ramp)
    return mixed


def rotate(x: Tensor, theta: float, speeds: Tensor | None = None) -> Tensor:
    """Multiply the pair (x[j], x[j + d/2]), read as a complex number, by exp(i * position * theta^(-2j/d))."""
    half = x.shape[-1] // 2
    usual = theta ** -(torch.arange(half, dtype=x.dtype) / half)
    angles = torch.outer(torch.arange(x.shape[1], dtype=x.dtype), usual if speeds is None else speeds)
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((turned.real, turned.imag), dim=-1)


def mlp(weights: Weights, x: Tensor, options: Any) -> Tensor:
    up = linear(weights, "mlp.input.up", x)
    bent = linear(weights, "mlp.input.gate", x) if "mlp.input.gate.weight" in weights else up
    if options.activation == "swiglu":
        inner = bent * torch.sigmoid(bent)
    elif options.activation == "relu_squared":
        inner = torch.where(bent > 0, bent * bent, 0.0)
    elif options.activation.endswith("_tanh"):
        inner = 0.5 * bent * (1 + torch.tanh(math.sqrt(2 / math.pi) * (bent + 0.044715 * bent**3)))
    else:
        inner = 0.5 * bent * (1 + torch.erf(bent / math.sqrt(2)))
    return linear(weights, "mlp.output", inner if bent is up else inner * up)


def leaves(weights: Weights) -> Weights:
    """Copies that collect gradients."""
    return {name: weight.clone().requires_grad_() for name, weight in weights.items()}
