"""Every section but ``model`` and ``data`` that Megatron's arguments describe: training, parallel sizes, saving."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from decimal import Decimal
from fractions import Fraction
from types import MappingProxyType
from typing import Any

from megatron_run_format_megatron.launch_script.settings import (
    Arguments,
    Setting,
    default_of,
    given_keys,
    given_or_default,
)

_SHAPES = {
    "constant": "constant",
    "linear": "linear",
    "cosine": "cosine",
    "inverse-square-root": "inverse_sqrt",
    "WSD": "wsd",
}
_DYNAMIC = ("initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis")
#: Megatron's modules to recompute, as segments.
RECOMPUTED: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "core_attn": ("core_attn",),
        "mlp": ("mlp",),
        "moe": ("moe_router", "moe_preprocess", "moe_dispatch", "moe_experts", "moe_combine"),
    }
)
_MOMENTUM = 0.9  # Megatron's default for sgd and muon
#: Megatron's defaults: global batches of an evaluation, and steps between two evaluations.
_EVAL_BATCHES, _EVAL_INTERVAL = 100, 1000


def train(arguments: Arguments, batch: int) -> Iterator[Setting]:
    """The section ``train``; ``batch`` is the default of the global batch: one micro batch a data-parallel rank."""
    given = arguments.get
    yield from given_keys(arguments, "train")
    size = given("global_batch_size")
    why = "--global-batch-size" if size else "Megatron's default: one micro batch on each data-parallel rank"
    yield Setting("train.global_batch_size", size or batch, why)
    for key, value in zip(("start", "increment", "samples"), given("rampup_batch_size") or (), strict=False):
        yield Setting(f"train.ramp_up.{key}", value, "--rampup-batch-size")
    if given("calculate_per_token_loss"):
        yield Setting("train.loss_mean", "token", "--calculate-per-token-loss")
    precision = "bf16" if given("bf16") else "fp16" if given("fp16") else "fp32"
    why = f"--{precision}" if precision != "fp32" else "Megatron's default, without --bf16 and --fp16"
    yield Setting("train.precision", precision, why)
    yield from _learning_rate(arguments, size or batch)
    yield from _weight_decay(arguments)
    yield from _recompute(arguments)


def _recompute(arguments: Arguments) -> Iterator[Setting]:
    given = arguments.get
    if given("recompute_granularity") == "full" or given("checkpoint_activations"):
        full = given("recompute_granularity") == "full"
        yield Setting("train.recompute", "full", "--recompute-granularity full" if full else "--checkpoint-activations")
    elif given("recompute_granularity") == "selective" or given("recompute_activations"):
        segments = [name for module in recomputed_modules(arguments) for name in RECOMPUTED.get(module, ())]
        flags = ("--recompute-granularity", "--recompute-activations", "--recompute-modules")
        why = ", ".join(flag for flag in flags if given(flag.removeprefix("--").replace("-", "_")))
        named = given("recompute_modules") is not None
        yield Setting("train.recompute", segments, why if named else f"{why}; {default_of('--recompute-modules')}")


def recomputed_modules(arguments: Arguments) -> list[str]:
    """The parts that Megatron's selective recomputation names."""
    return arguments.get("recompute_modules") or ["core_attn"]


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
    """The flag that sets the span: steps win over samples. Empty where neither was given."""
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
    """The section ``scaler``: a static scale wins; otherwise fp16 is scaled dynamically."""
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


def parallel(arguments: Arguments) -> Iterator[Setting]:
    """The sections ``parallel`` and ``schedule``."""
    given = arguments.get
    tensor, pipeline = sizes(arguments)
    chunks = count_chunks(arguments)
    yield given_or_default(arguments, "parallel.tensor", "--tensor-model-parallel-size", 1)
    if given("context_parallel_size") is not None:
        yield Setting("parallel.context", given("context_parallel_size"), "--context-parallel-size")
    yield given_or_default(arguments, "parallel.pipeline", "--pipeline-model-parallel-size", 1)
    if chunks > 1:
        count = given("num_virtual_stages_per_pipeline_rank")
        each = "layers of a stage / --num-layers-per-virtual-pipeline-stage"
        yield Setting("parallel.chunks", chunks, "--num-virtual-stages-per-pipeline-rank" if count else each)
    if given("sequence_parallel") and tensor > 1:
        yield Setting("parallel.sequence", True, "--sequence-parallel")
    if given("expert_model_parallel_size", 1) > 1:
        yield Setting("parallel.expert", given("expert_model_parallel_size"), "--expert-model-parallel-size")
    yield from given_keys(arguments, "parallel")
    if pipeline > 1:
        name = "interleaved" if chunks > 1 else "1f1b"
        yield Setting("schedule.use", name, "Megatron's schedule of such a pipeline")
    if chunks > 1 and given("microbatch_group_size_per_virtual_pipeline_stage"):
        size = given("microbatch_group_size_per_virtual_pipeline_stage")
        yield Setting("schedule.group_size", size, "--microbatch-group-size-per-virtual-pipeline-stage")


def sizes(arguments: Arguments) -> tuple[int, int]:
    """The tensor-parallel and the pipeline-parallel size."""
    return arguments.get("tensor_model_parallel_size", 1), arguments.get("pipeline_model_parallel_size", 1)


def count_chunks(arguments: Arguments) -> int:
    """Chunks of each stage; 1 where the layers do not divide into chunks of the size asked for."""
    given, (_, pipeline) = arguments.get, sizes(arguments)
    if given("num_virtual_stages_per_pipeline_rank"):
        return int(arguments["num_virtual_stages_per_pipeline_rank"])
    each = given("num_layers_per_virtual_pipeline_stage")
    layers = given("num_layers")
    return layers // (pipeline * each) if each and layers and pipeline > 1 and layers % (pipeline * each) == 0 else 1


def run(arguments: Arguments) -> Iterator[Setting]:
    """The sections ``eval``, ``checkpoint``, ``guard`` and ``run``."""
    given = arguments.get
    batches = given_or_default(arguments, "eval.batches", "--eval-iters", _EVAL_BATCHES)
    if batches.value:
        yield given_or_default(arguments, "eval.interval", "--eval-interval", _EVAL_INTERVAL)
        yield batches
    else:
        yield Setting("eval.interval", 0, "--eval-iters 0: only at the end")
    interval = given("save_interval")
    why = "--save-interval" if interval else "no --save-interval: only at the end and when stopped"
    yield Setting("checkpoint.interval", interval or 0, why)
    yield from given_keys(arguments, "checkpoint")
    yield from given_keys(arguments, "guard")
    if given("save"):
        yield Setting("run.folder", given("save"), "--save; a folder of Megatron's own checkpoints is refused")
    if given("exit_duration_in_mins"):
        yield Setting("run.time_limit", f"{given('exit_duration_in_mins')} min", "--exit-duration-in-mins")
    if given("distributed_timeout_minutes"):
        yield Setting("run.timeout", 60 * arguments["distributed_timeout_minutes"], "--distributed-timeout-minutes")
    yield from given_keys(arguments, "run")
