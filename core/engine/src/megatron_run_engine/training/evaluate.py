"""Evaluation: the loss on held-out samples, computed by a forward-only plan for the same layout."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING

from megatron_run.contracts import EvalMetrics
from megatron_run.errors import DataError, InputError
from megatron_run_engine.data.batches import sample_at
from megatron_run_engine.runtime.execute import StepInputs
from megatron_run_engine.runtime.generation import Network
from megatron_run_engine.runtime.metrics import Metrics
from megatron_run_engine.training.judging import answers
from megatron_run_engine.training.losses import LANGUAGE_MODEL, Losses
from megatron_run_engine.training.tasks import Reader, make_work, run_task

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from torch import Tensor

    from megatron_run.contracts import Chunk, Dataset
    from megatron_run.planning import ResolvedRun
    from megatron_run_engine.training.build import Assembly
    from megatron_run_engine.training.loader import BatchLoader


class Evaluator:
    """Scores ``eval.batches`` global batches of the validation split, the same samples in every evaluation.

    ``samples`` holds their indices, the same for every layout. Of a split smaller than one global batch all samples are
    scored; the loader fills the last microbatches with samples whose loss mask is zero.
    """

    def __init__(self, run: ResolvedRun, assembly: Assembly, loader: BatchLoader, dataset: Dataset) -> None:
        self._run, self._assembly, self._loader, self._dataset = run, assembly, loader, dataset
        train = run.config.train
        self._per_microbatch = train.micro_batch_size * run.sizes.data
        self._per_batch = train.global_batch_size // self._per_microbatch
        batches = min(len(dataset) // train.global_batch_size, run.config.eval.batches)
        drawn = range(batches * train.global_batch_size or len(dataset))
        self.samples = [sample_at(dataset, train.seed, position) for position in drawn]
        self._microbatches = -(-len(drawn) // self._per_microbatch)

        if run.config.eval.tasks and not assembly.model.predicts_next:
            raise InputError(f"eval.tasks scores next tokens, and {run.one('model')} does not predict them")
        reader = Reader(assembly.data, train.sequence_length, train.seed, assembly.context.vocab_size)
        self._judge = assembly.data.judge("validation", train.sequence_length, train.seed)
        self._tasks = [make_work(task, reader) for task in run.config.eval.tasks]

    def tasks(self, step: int) -> list[EvalMetrics]:
        """Evaluate ``eval.tasks`` after ``step`` steps. Collective over the world."""
        if not self._tasks:
            return []
        self._assembly.context.groups.activity.enter("evaluate")
        network = network_of(self._run, self._assembly)
        set_training(self._assembly.chunks, training=False)
        results = [run_task(*task, network) for task in self._tasks]
        set_training(self._assembly.chunks, training=True)
        return [result.at_step(step) for result in results]

    def evaluate(self, step: int) -> EvalMetrics:
        """Score the model after ``step`` steps. Collective over the world."""
        self._assembly.context.groups.activity.enter("evaluate")
        metrics = Metrics(self._assembly.context.device)
        report = Losses(self._assembly.model, metrics).report
        set_training(self._assembly.chunks, training=False)
        for first in range(0, self._microbatches, self._per_batch):
            self._run_batch(first, min(self._per_batch, self._microbatches - first), report)
        judged = self._judged()
        set_training(self._assembly.chunks, training=True)
        loss, tokens = self._language_loss(metrics)
        perplexity = math.exp(min(loss, 700.0))  # exp overflows a double above 709
        return EvalMetrics(step, "validation", loss, perplexity, tokens, judged)

    def _judged(self) -> Mapping[str, float]:
        """What the data makes of the model's logits for its validation split; nothing where it judges nothing."""
        if self._judge is None:
            return {}
        names = [field.name for field in self._assembly.data.fields]
        network = network_of(self._run, self._assembly)
        size = self._run.config.train.micro_batch_size
        return dict(self._judge(answers(network, self._dataset, names, size).numpy()))

    def _run_batch(self, first: int, microbatches: int, report: Callable[[int, str, Tensor, Tensor], None]) -> None:
        """Run ``microbatches`` microbatches from ``first`` on. One batch at a time bounds the memory of messages."""
        run, assembly = self._run, self._assembly
        train = run.config.train
        boundary = partial(
            assembly.model.boundary, micro_batch_size=train.micro_batch_size, sequence_length=train.sequence_length
        )
        microbatch = self._loader.evaluation(self._dataset, self.samples[first * self._per_microbatch :])
        program = assembly.programs.forward_only(microbatches)
        assembly.executor.run(program, StepInputs(microbatch, boundary, report))

    def _language_loss(self, metrics: Metrics) -> tuple[float, int]:
        sums = metrics.collect(self._assembly.context.groups).tolist()
        total, weight = sums[metrics.names.index(LANGUAGE_MODEL)]
        if not weight:
            raise DataError("the validation samples hold no token that counts", why="their loss_mask is zero")
        # Every tensor-parallel rank reports the same tokens: the factor cancels in the mean, but not in the count.
        return total / weight, round(weight / self._run.sizes.tensor)


def network_of(run: ResolvedRun, assembly: Assembly) -> Network:
    """The model in training, as what generates and scores tokens sees it."""
    program = assembly.programs.forward_only(1)
    return Network(assembly.context, assembly.model, assembly.chunks, assembly.executor, program, run.layout[-1].stage)


def set_training(chunks: Iterable[Chunk], *, training: bool) -> None:
    """Switch dropout on or off in every module of ``chunks``."""
    for chunk in chunks:
        chunk.train(training)
