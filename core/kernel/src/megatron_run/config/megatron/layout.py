"""Where and on what a run of Megatron-LM runs, in keys of ours: parallel sizes, their plugins, data, times, folders."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_run.config.megatron.model import Arguments, Setting, find_vocabulary, given_keys, given_or_default

#: Global batches of an evaluation, and steps between two, where no flag says it.
_EVAL_BATCHES, _EVAL_INTERVAL = 100, 1000


def parallel(arguments: Arguments) -> Iterator[Setting]:
    """The sections ``parallel``, ``parallel-layer`` and ``schedule``."""
    given = arguments.get
    tensor, pipeline = sizes(arguments)
    chunks = count_chunks(arguments)
    yield given_or_default(arguments, "parallel.tensor", "--tensor-model-parallel-size", 1)
    yield given_or_default(arguments, "parallel.pipeline", "--pipeline-model-parallel-size", 1)
    if chunks > 1:
        told = given("num_virtual_stages_per_pipeline_rank")
        each = "layers of a stage / --num-layers-per-virtual-pipeline-stage"
        yield Setting("parallel.chunks", chunks, "--num-virtual-stages-per-pipeline-rank" if told else each)
    if given("sequence_parallel") and tensor > 1:
        yield Setting("parallel.sequence", True, "--sequence-parallel")
    if given("expert_model_parallel_size", 1) > 1:
        yield Setting("parallel.expert", given("expert_model_parallel_size"), "--expert-model-parallel-size")
    yield from given_keys(arguments, "parallel")
    if tensor > 1:
        yield Setting("parallel-layer.use", "tensor", "serves parallel.tensor")
    if pipeline > 1:
        name = "interleaved" if chunks > 1 else "1f1b"
        yield Setting("schedule.use", name, "Megatron's schedule of such a pipeline")
    if chunks > 1 and given("microbatch_group_size_per_virtual_pipeline_stage"):
        size = given("microbatch_group_size_per_virtual_pipeline_stage")
        yield Setting("schedule.group_size", size, "--microbatch-group-size-per-virtual-pipeline-stage")


def sizes(arguments: Arguments) -> tuple[int, int]:
    """How many ranks split each layer, and how many stages there are."""
    return arguments.get("tensor_model_parallel_size", 1), arguments.get("pipeline_model_parallel_size", 1)


def count_chunks(arguments: Arguments) -> int:
    """Pieces of the model on each stage; 1 where the layers do not divide into such pieces."""
    given, (_, pipeline) = arguments.get, sizes(arguments)
    if given("num_virtual_stages_per_pipeline_rank"):
        return int(arguments["num_virtual_stages_per_pipeline_rank"])
    each = given("num_layers_per_virtual_pipeline_stage")
    layers = given("num_layers")
    return layers // (pipeline * each) if each and layers and pipeline > 1 and layers % (pipeline * each) == 0 else 1


def data(arguments: Arguments) -> Iterator[Setting]:
    """The section ``data``. Nothing reads indexed datasets yet, so that it is mock data in any case."""
    asked = arguments.get("mock_data")
    why = "--mock-data" if asked else "NOT YOUR DATA: indexed datasets are not read yet; data=text reads text"
    yield Setting("data.use", "mock", why)
    vocabulary = find_vocabulary(arguments)
    if vocabulary is not None:
        yield vocabulary._replace(key="data.vocab_size")


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
