"""A launch script of Megatron-LM becomes a configuration that resolves, and everything that no key says is told."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from megatron_run.config.request import Request
from megatron_run.config.values import flat
from megatron_run.errors import InputError
from megatron_run.planning import resolve
from megatron_run.planning.run import ResolvedRun
from megatron_run_format_megatron.launch_script.flags import FLAGS, find
from megatron_run_format_megatron.launch_script.flags.kinds import Verdict
from megatron_run_format_megatron.launch_script.script import read_script
from megatron_run_format_megatron.launch_script.translate import Translation, read_flags, translate, yaml
from tests.plugins.format.megatron.golden_translations import SCRIPTS, translated

GPT = """
#!/bin/bash
GPUS_PER_NODE=4
CHECKPOINTS=$1
MODEL_ARGS=(
    --num-layers 8
    --hidden-size 64
    --num-attention-heads 4
    --seq-length 128
    --max-position-embeddings 128
    --attention-backend auto # or flash
)
TRAINING_ARGS=(
    --micro-batch-size 2
    --global-batch-size 32
    --train-iters 1000
    --weight-decay 0.1
    --adam-beta1 0.9
    --adam-beta2 0.95
    --init-method-std 0.006
    --clip-grad 0.5
    --fp16 --initial-loss-scale 65536 --hysteresis 3
    --lr 6.0e-5 --min-lr 6.0e-6 --lr-decay-style cosine
    --lr-warmup-fraction .001 --lr-decay-iters 900
)
torchrun --nproc_per_node $GPUS_PER_NODE pretrain_gpt.py \\
    ${MODEL_ARGS[@]} \\
    ${TRAINING_ARGS[@]} \\
    --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 \\
    --vocab-file vocab.json --merge-file merges.txt --data-path /data/text --split 949,50,1 \\
    --save $CHECKPOINTS --load $CHECKPOINTS --save-interval 100 --eval-iters 10 --log-interval 10 2>&1 | tee log
"""
LLAMA = """
OPTIONS=" \\
  --num-layers 8 --hidden-size 64 --num-attention-heads 8 --group-query-attention --num-query-groups 2 \\
  --swiglu --disable-bias-linear --normalization RMSNorm --norm-epsilon 1e-6 --untie-embeddings-and-output-weights \\
  --position-embedding-type rope --rotary-base 500000 --no-rope-fusion \\
  --attention-dropout 0.0 --hidden-dropout 0.0 --seq-length 64 --max-position-embeddings 64"
OPTIONS="$OPTIONS --micro-batch-size 1 --train-samples 64000 --lr 3e-4 --lr-decay-style WSD \\
  --lr-wsd-decay-samples 6400 --lr-wsd-decay-style minus_sqrt --lr-warmup-samples 500 --bf16 --grad-reduce-in-bf16 \\
  --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --decoupled-lr 3e-5"
OPTIONS="$OPTIONS --tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2 \\
  --num-layers-per-virtual-pipeline-stage 2 --microbatch-group-size-per-virtual-pipeline-stage 4 \\
  --global-batch-size 32 --rampup-batch-size 8 8 640 --recompute-granularity full --mock-data \\
  --tokenizer-type NullTokenizer --vocab-size 255 --exit-duration-in-mins 230 --distributed-timeout-minutes 30"
srun bash -c "python pretrain_gpt.py $OPTIONS"
"""


MIXTURE = """
ARGS=(
    --num-layers 8 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64
    --micro-batch-size 1 --global-batch-size 8 --train-iters 10 --lr 1e-4 --bf16 --mock-data
    --num-experts 8 --moe-router-topk 3 --moe-ffn-hidden-size 48 --moe-layer-freq '([1]*1+[0]*1)*4'
    --moe-router-pre-softmax --moe-aux-loss-coeff 0.02 --moe-z-loss-coeff 1e-3 --moe-expert-capacity-factor 1.25
    --moe-token-dispatcher-type alltoall --moe-shared-expert-intermediate-size 64
    --moe-grouped-gemm --moe-permute-fusion
    --tensor-model-parallel-size 2 --expert-model-parallel-size 2
)
torchrun pretrain_gpt.py ${ARGS[@]}
"""


def run_of(script: str) -> tuple[Translation, ResolvedRun]:
    """What a script becomes, and the run to which its YAML resolves."""
    found = translate(script, "train.sh")
    return found, resolve(Request(("-",), stdin=yaml(found, "train.sh")))


def flags_of(words: str) -> Translation:
    return translate(f"python pretrain_gpt.py {words}", "train.sh")


def key(found: Translation, name: str) -> Any:
    return {setting.key: setting.value for setting in found.settings}.get(name)


def test_a_gpt_script_resolves_to_the_run_that_it_describes() -> None:
    found, run = run_of(GPT)
    train, model = run.config.train, flat(run.config.model.options)
    assert (model["num_layers"], model["hidden_size"], model["num_heads"]) == (8, 64, 4)
    assert (model["activation"], model["norm.kind"], model["bias"], model["position"]) == (
        "gelu_tanh", "layernorm", True, "learned",
    )  # fmt: skip
    assert (model["vocab_size"], model["dropout"], model["init_std"]) == (50257, 0.1, 0.006)
    assert (train.steps, train.sequence_length, train.micro_batch_size, train.global_batch_size) == (1000, 128, 2, 32)
    assert (train.lr, train.min_lr, train.lr_shape, train.clip_norm, train.weight_decay) == (
        6e-5, 6e-6, "cosine", 0.5, 0.1,
    )  # fmt: skip
    total, batch = 1000 * 32, 32
    assert train.lr_decay.samples(total, batch) == 900 * 32
    assert train.lr_warmup.samples(total, batch) == round(0.001 * 900 * 32)
    assert (train.precision, run.config.scaler.use) == ("fp16", "dynamic")
    assert run.config.scaler.options["initial_loss_scale"] == 65536
    assert run.config.scaler.options["hysteresis"] == 3
    assert run.config.optimizer.options["betas"] == [0.9, 0.95]
    assert (run.config.parallel_layer.use, run.config.schedule.use) == (("tensor",), "1f1b")
    assert run.config.eval.batches == 10
    assert run.config.checkpoint.interval.steps(1000, 32) == 100
    assert not found.notes[Verdict.DIFFERS]
    data = run.config.data
    assert (data.use, data.options["paths"], data.options["split"]) == ("indexed", ["/data/text"], [949, 50, 1])
    assert [note.flag for note in found.open] == ["--save $1", "--vocab-file vocab.json --merge-file merges.txt"]
    assert found.start.endswith("megatron-run FILE --nproc 4")
    assert {note.flag for note in found.notes[Verdict.SAME]} >= {"--load $1", "--attention-backend auto"}


def test_a_llama_script_resolves_to_the_run_that_it_describes() -> None:
    found, run = run_of(LLAMA)
    train, model = run.config.train, flat(run.config.model.options)
    assert (model["num_kv_heads"], model["ffn_size"], model["activation"]) == (2, 128, "swiglu")
    assert (model["norm.kind"], model["norm.eps"], model["bias"]) == ("rmsnorm", 1e-6, False)
    assert (model["position"], model["rope.theta"], model["tie_embeddings"]) == ("rope", 500000, False)
    assert (model["dropout"], model["vocab_size"]) == (0, 256)
    assert (train.samples, train.lr_shape, train.lr_wsd_shape) == (64000, "wsd", "minus_sqrt")
    assert (str(train.lr_wsd), str(train.lr_warmup), train.precision) == ("6400 samples", "500 samples", "bf16")
    assert train.ramp_up is not None
    assert (train.ramp_up.start, train.ramp_up.increment, train.ramp_up.samples) == (8, 8, 640)
    assert train.recompute == "full"
    options = run.config.optimizer.options
    assert (run.config.optimizer.use, options["grad_dtype"]) == ("zero1", "param")
    assert options["lr_mult"] == ["embedding.*:0.1", "output.*:0.1"]
    parallel = run.config.parallel
    assert (parallel.tensor, parallel.pipeline, parallel.chunks, parallel.sequence) == (2, 2, 2, True)
    assert (run.config.schedule.use, run.config.schedule.options["group_size"]) == ("interleaved", 4)
    assert run.config.run.time_limit is not None
    assert (run.config.run.time_limit.seconds, run.config.run.timeout) == (230 * 60, 1800)
    assert found.warnings == []
    assert any(line.startswith("--no-rope-fusion: ") for line in found.remarks)


def test_a_mixture_of_experts_resolves_to_the_run_that_it_describes() -> None:
    found, run = run_of(MIXTURE)
    model = flat(run.config.model.options)
    assert (model["experts.count"], model["experts.top_k"], model["experts.ffn_size"]) == (8, 3, 48)
    assert (model["experts.aux_loss_coeff"], model["experts.z_loss_coeff"], model["experts.capacity_factor"]) == (
        0.02,
        1e-3,
        1.25,
    )
    assert (model["experts.router.pre_softmax"], model["experts.dispatcher"]) == (True, "alltoall")
    assert (model["experts.layer_pattern"], model["experts.shared.ffn_size"]) == ([1, 0] * 4, 64)
    assert (run.config.parallel.expert, run.config.parallel.tensor) == (2, 2)
    assert not [note for note in found.notes[Verdict.DIFFERS] if "moe" in note.flag]


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        ("--num-experts 4", "model.experts.aux_loss_coeff", 0.0),  # ours is 0.01
        (
            "--num-experts 4 --moe-aux-loss-coeff 0.1 --moe-router-load-balancing-type none",
            "model.experts.aux_loss_coeff",
            0.0,
        ),
        ("--num-experts 4 --moe-layer-freq 2", "model.experts.layer_freq", 2),
        ("--num-experts 4 --moe-layer-freq ([0]+[1]*3)", "model.experts.layer_pattern", [0, 1, 1, 1]),
        ("--num-experts 4", "model.experts.dispatcher", "allgather"),
        ("--num-experts 8 --moe-router-topk 4 --moe-router-group-topk 2", "model.experts.router.group_best", 2),
        ("--num-experts 4 --moe-router-enable-expert-bias", "model.experts.router.bias_rate", 0.001),
        ("--moe-router-topk 4", "model.experts.top_k", None),
        ("--swiglu --hidden-size 4096", "model.ffn_size", 10880),  # int(4 * 4096 * 2 / 3 / 64) * 64
        ("--disable-bias-linear", "model.activation", "gelu"),
        ("--no-bias-gelu-fusion", "model.activation", "gelu"),
        ("--lr 1", "model.activation", "gelu_tanh"),
        ("--lr 1", "train.lr_shape", "linear"),
        ("--lr 1", "train.lr_warmup", 0),
        ("--recompute-activations", "train.recompute", ["core_attn"]),
        (
            "--recompute-granularity selective --recompute-modules core_attn mlp",
            "train.recompute",
            ["core_attn", "mlp"],
        ),
        ("--recompute-modules mlp", "train.recompute", None),
        ("--lr 1", "eval.batches", 100),
        ("--lr 1", "checkpoint.interval", 0),
        ("--lr 1", "train.global_batch_size", 1),
        ("--lr-warmup-fraction .01", "train.lr_warmup", "1%"),
        ("--lr-warmup-fraction 0.01 --lr-decay-samples 5000", "train.lr_warmup", "50 samples"),
        ("--lr-warmup-fraction 0.01 --lr-decay-iters 150 --global-batch-size 8", "train.lr_warmup", "12 samples"),
        ("--lr-warmup-iters 7", "train.lr_warmup", 7),
        ("--loss-scale 1024 --fp16", "scaler.use", "constant"),
        ("--group-query-attention", "model.num_kv_heads", 1),
        (
            "--weight-decay-incr-style linear --start-weight-decay 0.1 --end-weight-decay 0.2",
            "train.weight_decay_end",
            0.2,
        ),
        ("--eval-iters 0 --eval-interval 5", "eval.interval", 0),
        ("--num-virtual-stages-per-pipeline-rank 3", "parallel.chunks", 3),
        ("--sequence-parallel", "parallel.sequence", None),  # Megatron drops it without tensor parallelism
        ("--calculate-per-token-loss", "train.loss_mean", "token"),
        ("--num-experts 4 --moe-token-dispatcher-type alltoall", "model.experts.dispatcher", "alltoall"),
        ("--num-experts 4 --moe-token-dispatcher-type flex", "model.experts.dispatcher", None),
        ("--tokenizer-type Llama2Tokenizer --tokenizer-model x.model", "model.vocab_size", 32000),
        ("--tokenizer-type Llama2Tokenizer --padded-vocab-size 64000", "model.vocab_size", 64000),
        ("--tokenizer-type HuggingFaceTokenizer --tokenizer-model a/b", "model.vocab_size", None),
        ("--fp8-format hybrid", "parallel-layer.fp8", "delayed"),
        ("--fp8-format hybrid", "parallel-layer.fp8_amax_history", 1),  # ours is 1024
        ("--fp8-format hybrid --fp8-recipe tensorwise", "parallel-layer.fp8", "current"),
        ("--fp8-format e4m3 --tensor-model-parallel-size 2", "parallel-layer.use", "te"),
        ("--fp8-format e4m3 --fp8-recipe custom", "parallel-layer.use", None),
        ("--fp8-recipe mxfp8", "parallel-layer.use", None),
        ("--transformer-impl transformer_engine", "parallel-layer.use", None),
        ("--enable-cuda-graph", "graph-capture.use", "partial"),
        ("--external-cuda-graph", "graph-capture.use", "te"),
        ("--cuda-graph-impl none --cuda-graph-scope attn", "graph-capture.use", None),
        ("--cuda-graph-impl local", "graph-capture.scope", ["attn", "mlp"]),
        ("--cuda-graph-impl local --cuda-graph-modules attn,moe_router", "graph-capture.scope", ["attn"]),
        (
            "--cuda-graph-impl local --cuda-graph-scope full --num-experts 2",
            "graph-capture.scope",
            [
                "attn",
                "moe_router",
                "moe_preprocess",
            ],
        ),
        ("--cuda-graph-impl local --recompute-granularity full", "graph-capture.use", None),
        ("--async-save", "checkpoint.async_save", True),
        ("--check-weight-hash-across-dp-replicas-interval 50", "guard.replica_interval", 50),
        ("--optimizer sgd", "optimizer.momentum", 0.9),
        ("--optimizer dist_muon", "optimizer.rule", "muon"),
        ("--override-opt_param-scheduler --use_rotary_position_embeddings", "model.position", "rope"),
        ("--lr 1 --lr=2", "train.lr", 2.0),
    ],
)
def test_keys_that_follow_from_flags(words: str, name: str, value: object) -> None:
    assert key(flags_of(words), name) == value


def test_the_global_batch_follows_from_the_launcher() -> None:
    script = "torchrun --nproc-per-node=8 --nnodes 2 t.py --micro-batch-size 3 --tensor-model-parallel-size 4"
    assert key(translate(script, "train.sh"), "train.global_batch_size") == 3 * 16 // 4


@pytest.mark.parametrize(
    ("words", "warning"),
    [
        ("--qk-l2-norm", "--qk-l2-norm: norms of queries and keys have weights"),
        ("--attention-dropout 0", "--attention-dropout 0.0: one dropout serves all: model.dropout is 0.1"),
        (
            "--hidden-dropout 0",
            "Megatron's default of --attention-dropout, 0.1: one dropout serves all: model.dropout is",
        ),
        ("--load /other", "--load /other: starts from other weights"),
        ("--position-embedding-type relative", "--position-embedding-type relative: positions are learned"),
        ("--num-experts 4 --moe-router-load-balancing-type sinkhorn", "--moe-router-load-balancing-type sinkhorn: "),
        ("--num-layer 2", "--num-layer 2: this flag is not known; did you mean '--num-layers'?"),
        (
            "--moe-aux-loss-coef 0.1",
            "--moe-aux-loss-coef 0.1: this flag is not known; did you mean '--moe-aux-loss-coeff'?",
        ),
        ("--fp8-format e4m3 --fp8-recipe custom", "--fp8-format e4m3 --fp8-recipe custom: formats are hybrid, e4m3"),
        ("--tiktoken-patern v2", "--tiktoken-patern v2: this flag is not known; did you mean '--tiktoken-pattern'?"),
        ("--guess-file x", "--guess-file x: this flag is not known"),
        ("--bf16 $MORE", "$MORE: only a shell knows which flags these are"),
        ("$MORE --bf16", "$MORE: only a shell knows which flags these are"),
        ("--lr 1 --lr 2", "--lr 1 is given again later, and the last one counts"),
        ("--save $OUT", "--save $OUT: only a shell knows the value: set run.folder"),
    ],
)
def test_what_makes_another_run_is_a_warning(words: str, warning: str) -> None:
    (found,) = flags_of(words).warnings
    assert found.startswith(warning)


@pytest.mark.parametrize(
    "script",
    [
        GPT,
        LLAMA,
        MIXTURE,
        "t.py --lr 1",
        "t.py --group-query-attention --use-rotary-position-embeddings --no-bias-gelu-fusion --lr-warmup-iters 0",
        "t.py --disable-bias-linear --lr-decay-style WSD --lr-wsd-decay-iters 5 --lr-warmup-iters 0",
        "t.py --lr-warmup-iters 0 --lr-warmup-samples 9",
        "t.py --weight-decay-incr-style linear --end-weight-decay 1 --optimizer sgd --adam-beta2 0.9",
        "t.py --num-experts 4 --moe-aux-loss-coeff 0 --swiglu --hidden-size 64 --checkpoint-activations --bf16",
        "t.py --num-experts 4 --moe-router-load-balancing-type none --eval-iters 0",
        "t.py --num-layers 8 --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2",
    ],
)
def test_a_comment_names_a_flag_that_was_given_or_says_that_it_is_a_default(script: str) -> None:
    """And no default hides a flag: what stands after its word is a flag that was not given."""
    given = set(re.findall(r"--[a-z][\w-]*", script))
    for name, _, why in translate(script if "\n" in script else f"python {script}", "train.sh").settings:
        asked, _, default = re.sub(r"\bno (?=--)", "Megatron's default of ", why).partition("Megatron's default")
        assert set(re.findall(r"--[\w-]+", asked)) <= given, f"{name}: {why}"
        assert not set(re.findall(r"--[\w-]+", default)) & given, f"{name}: {why}"
        assert asked or default, name


@pytest.mark.parametrize(
    "words",
    [
        "--rotary-percent 1.0",
        "--num-experts 0",
        "--moe-input-jitter-eps 0",
        "--context-parallel-size 1",
        "--lr-warmup-init 0.0",
    ],
)
def test_a_value_with_which_nothing_differs_is_no_warning(words: str) -> None:
    assert flags_of(words).warnings == []


@pytest.mark.parametrize(
    "words", ["--num-layers two", "--lr 1 2", "--fp16 yes", "--num-layers", "--num-experts 2 --moe-layer-freq [2]"]
)
def test_a_value_that_cannot_be_read_is_one_line(words: str) -> None:
    with pytest.raises(InputError, match="cannot be read: "):
        flags_of(words)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_the_golden_scripts_become_what_was_read_and_found_right(script: Path) -> None:
    assert translated(script)[1] == script.with_suffix(".yaml").read_text(encoding="utf-8"), (
        "python -m tests.plugins.format.megatron.golden_translations"
    )


@pytest.mark.parametrize(
    "script",
    [  # the ramp of gpt_175b has 96 sizes of the batch, and each is planned
        pytest.param(script, id=script.stem, marks=[pytest.mark.nightly] * (script.stem == "gpt_175b"))
        for script in SCRIPTS
    ],
)
def test_a_golden_script_resolves_on_as_many_ranks_as_it_starts(script: Path) -> None:
    found, text = translated(script)
    ranks = re.search(r"starts (\d+) rank", found.start)
    resolve(Request(("-",), stdin=text, nproc=int(ranks[1]) if ranks else None))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_every_flag_is_a_key_or_is_listed_in_the_file_and_on_standard_error(script: Path) -> None:
    found = translated(script)[0]
    read = read_script(script.read_text(encoding="utf-8"), script.name)
    text, said = yaml(found, script.name), " ".join((*found.remarks, *found.warnings))
    keys = " ".join(setting.why for setting in found.settings)
    for flag, _ in (*read_flags(read.launcher), *read_flags(read.arguments)):
        named = re.compile(rf"{re.escape(flag)}(?![\w-])")
        assert named.search(text), flag
        assert named.search(keys) or named.search(said), flag


@pytest.mark.parametrize(
    ("launcher", "start"),
    [
        ("torchrun --nproc_per_node 8", "megatron-run FILE --nproc 8"),
        ("python -m torch.distributed.run --nproc-per-node=2 --nnodes=1", "megatron-run FILE --nproc 2"),
        (
            "torchrun --nproc-per-node 8 --nnodes 2",
            "torchrun --nproc-per-node 8 --nnodes 2 ... -m megatron_run_cli FILE",
        ),
        ("python", ""),
        ("torchrun --nproc-per-node $N", ""),
    ],
)
def test_the_number_of_ranks_is_said(launcher: str, start: str) -> None:
    found = translate(f"{launcher} pretrain_gpt.py --lr 1", "train.sh")
    assert found.start.partition(": say ")[2] == start
    assert found.start in found.warnings or not start
    assert ("$N" in launcher) == bool(found.open)


def test_no_flag_stands_twice_and_none_hides_another() -> None:
    names = [flag.name for flag in FLAGS]
    assert len(set(names)) == len(names)
    assert not [name for name in names if "*" not in name and find(name) != FLAGS[names.index(name)]]


def test_of_two_flags_that_say_one_span_the_comment_names_the_one_that_counts() -> None:
    found = flags_of("--lr-warmup-iters 0 --lr-warmup-samples 9")
    assert [each[1:] for each in found.settings if each.key == "train.lr_warmup"] == [
        ("9 samples", "--lr-warmup-samples")
    ]
