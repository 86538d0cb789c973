"""How a run of Megatron-LM learns, in keys of ours: the sections ``train``, ``scaler`` and ``optimizer``."""

from __future__ import annotations

from collections.abc import Iterator
from decimal import Decimal
from fractions import Fraction
from typing import Any

from megatron_run.config.megatron.model import Arguments, Setting, default_of, given_keys, given_or_default

_SHAPES = {
    "constant": "constant",
    "linear": "linear",
    "cosine": "cosine",
    "inverse-square-root": "inverse_sqrt",
    "WSD": "wsd",
}
_DYNAMIC = ("initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis")
_MOMENTUM = 0.9  # Megatron's default for sgd and muon


def train(arguments: Arguments, batch: int) -> Iterator[Setting]:
    """The section ``train``; ``batch`` is the global batch where no flag says it: one microbatch a rank."""
    given = arguments.get
    yield from given_keys(arguments, "train")
    size = given("global_batch_size")
    why = "--global-batch-size" if size else "Megatron's default: one micro batch on each data-parallel rank"
    yield Setting("train.global_batch_size", size or batch, why)
    for key, value in zip(("start", "increment", "samples"), given("rampup_batch_size") or (), strict=False):
        yield Setting(f"train.ramp_up.{key}", value, "--rampup-batch-size")
    precision = "bf16" if given("bf16") else "fp16" if given("fp16") else "fp32"
    why = f"--{precision}" if precision != "fp32" else "Megatron's default, without --bf16 and --fp16"
    yield Setting("train.precision", precision, why)
    yield from _learning_rate(arguments, size or batch)
    yield from _weight_decay(arguments)
    if given("recompute_granularity") == "full" or given("checkpoint_activations"):
        full = given("recompute_granularity") == "full"
        yield Setting("train.recompute", "full", "--recompute-granularity full" if full else "--checkpoint-activations")


def _learning_rate(arguments: Arguments, batch: int) -> Iterator[Setting]:
    given = arguments.get
    style = given("lr_decay_style")
    shape = _SHAPES.get(style or "linear", style)
    yield Setting("train.lr_shape", shape, "--lr-decay-style" if style else default_of("--lr-decay-style"))
    decay = _span(arguments, "lr_decay")
    if decay is not None:
        yield Setting("train.lr_decay", decay, _span_flag(arguments, "lr_decay"))
    fraction = given("lr_warmup_fraction")
    if fraction is not None:
        yield Setting("train.lr_warmup", _share(fraction, decay, batch), f"--lr-warmup-fraction {fraction}")
    else:
        why = _span_flag(arguments, "lr_warmup") or default_of("--lr-warmup-iters")
        yield Setting("train.lr_warmup", _span(arguments, "lr_warmup") or 0, why)
    if shape == "wsd":
        yield given_or_default(arguments, "train.lr_wsd_shape", "--lr-wsd-decay-style", "exponential")
        length = _span(arguments, "lr_wsd_decay")
        if length is not None:
            yield Setting("train.lr_wsd", length, _span_flag(arguments, "lr_wsd_decay"))


def _span(arguments: Arguments, name: str) -> int | str | None:
    """``NAME-iters`` as a number of steps, ``NAME-samples`` as samples."""
    steps, samples = arguments.get(f"{name}_iters"), arguments.get(f"{name}_samples")
    return steps or (f"{samples} samples" if samples else None)


def _span_flag(arguments: Arguments, name: str) -> str:
    """Which flag says the span: steps win. Empty where none was given."""
    given = [unit for unit in ("iters", "samples") if arguments.get(f"{name}_{unit}") is not None]
    decides = next((unit for unit in given if arguments[f"{name}_{unit}"]), *given[:1] or [""])
    return f"--{name.replace('_', '-')}-{decides}" if decides else ""


def _share(fraction: float, of: int | str | None, batch: int) -> int | str:
    """A fraction of the whole run, or of the span ``of``."""
    exact = Fraction(str(fraction))
    if of is None:
        return f"{(Decimal(str(fraction)) * 100).normalize():f}%"
    if isinstance(of, str):
        return f"{round(exact * int(of.split()[0]))} samples"
    steps = exact * of
    return int(steps) if steps.denominator == 1 else f"{round(steps * batch)} samples"


def _weight_decay(arguments: Arguments) -> Iterator[Setting]:
    given = arguments.get
    if given("weight_decay_incr_style", "constant") == "constant":
        if given("weight_decay") is not None:
            yield Setting("train.weight_decay", given("weight_decay"), "--weight-decay")
        return
    yield given_or_default(arguments, "train.weight_decay", "--start-weight-decay", 0.0)
    yield given_or_default(arguments, "train.weight_decay_end", "--end-weight-decay", 0.0)
    yield Setting("train.weight_decay_shape", given("weight_decay_incr_style"), "--weight-decay-incr-style")


def scaler(arguments: Arguments) -> Iterator[Setting]:
    """The section ``scaler``: a static scale wins, then fp16 is scaled dynamically."""
    given = arguments.get
    if given("loss_scale"):
        yield Setting("scaler.use", "constant", "--loss-scale")
        yield Setting("scaler.loss_scale", given("loss_scale"), "--loss-scale")
    elif given("fp16"):
        yield Setting("scaler.use", "dynamic", "--fp16")
        for name in _DYNAMIC:
            if given(name) is not None:
                yield Setting(f"scaler.{name}", _plain(given(name)), f"--{name.replace('_', '-')}")


def optimizer(arguments: Arguments) -> Iterator[Setting]:
    """The section ``optimizer``."""
    given = arguments.get
    if given("use_distributed_optimizer"):
        yield Setting("optimizer.use", "zero1", "--use-distributed-optimizer")
    else:
        yield Setting("optimizer.use", "adamw", "Megatron's default; --use-distributed-optimizer chooses zero1")
    rule = (given("optimizer") or "adam").removeprefix("dist_")
    if rule != "adam":
        yield Setting("optimizer.rule", rule, "--optimizer")
        yield given_or_default(arguments, "optimizer.momentum", f"--{rule}-momentum", _MOMENTUM)
    if given("adam_beta1") is not None or given("adam_beta2") is not None:
        betas = [
            given_or_default(arguments, "optimizer.betas", flag, default)
            for flag, default in (("--adam-beta1", 0.9), ("--adam-beta2", 0.999))
        ]
        yield Setting("optimizer.betas", [beta.value for beta in betas], ", ".join(sorted(beta.why for beta in betas)))
    yield from given_keys(arguments, "optimizer")
    if given("decoupled_lr") and given("lr"):
        factor = f"{arguments['decoupled_lr'] / arguments['lr']:g}"
        yield Setting("optimizer.lr_mult", [f"embedding.*:{factor}", f"output.*:{factor}"], "--decoupled-lr / --lr")
    if given("grad_reduce_in_bf16"):
        yield Setting("optimizer.grad_dtype", "param", "--grad-reduce-in-bf16")


def _plain(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value
