"""Evaluation: the loss on held-out samples, computed by a forward-only plan for the same layout.

Beyond the loss there are metrics that the data makes of a model's logits for all samples of a split; and at the end of
a training a sample of text (``eval.sample``).

Legend: b rows of a pass, s positions of the logits, k classes.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from megatron_run.contracts import EvalMetrics, Microbatch
from megatron_run.errors import InputError
from megatron_run_engine.data.batches import fields, sample_at
from megatron_run_engine.evaluation.sample_losses import score_samples
from megatron_run_engine.evaluation.tasks import TextReader, make_work, perplexity_of, run_task
from megatron_run_engine.runtime.execute import StepInputs
from megatron_run_engine.runtime.generation import Generation, Network, Sampling, TextTokens

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from torch import Tensor

    from megatron_run.contracts import Chunk, Dataset, DataSource
    from megatron_run.planning import ResolvedRun
    from megatron_run_engine.data.batches import RunSamples

#: What a model must not see to be asked for logits.
_ANSWERS = ("labels", "loss_mask")


@torch.no_grad()
def answers(network: Network, dataset: Dataset, names: Sequence[str], batch: int) -> Tensor:
    """Logits of every sample of ``dataset``, ``batch`` in a pass: fp32 [n, s, k] on the CPU of every rank.

    ``names`` are the fields of the samples. Collective over the world; the data-parallel copies take turns. The head
    is one that every tensor-parallel rank computes whole.
    """
    topology, device = network.context.topology, network.context.device
    copies, copy = topology.sizes.data, topology.data_rank
    given = [name for name in names if name not in _ANSWERS]
    firsts = range(0, len(dataset), batch)
    found = torch.empty(0)
    for turn in range(0, len(firsts), copies):
        first = firsts[min(turn + copy, len(firsts) - 1)]
        # Rows are filled with the last sample: passes of one shape, which sequence and schedule were planned for.
        numbers = [min(first + row, len(dataset) - 1) for row in range(batch)]
        logits = _pass(network, Microbatch(0, 0, 0, fields(dataset, numbers, given, device, network.cut), train=False))
        if not found.numel():
            found = torch.zeros(len(dataset), *_shape(network, logits), dtype=torch.float32, device=device)
        if logits is not None and turn + copy < len(firsts) and not topology.context_rank:
            found[first : first + batch] = logits[: len(dataset) - first]
    if topology.stage == network.last:
        network.context.groups.sum_(found, "replicas")
    return network.share(found).cpu()


def _pass(network: Network, microbatch: Microbatch) -> Tensor | None:
    """Logits [b, s, k] in fp32; None on a stage without the head."""
    rows, columns = microbatch.fields["tokens"].shape
    boundary = partial(network.model.boundary, micro_batch_size=rows, sequence_length=columns)
    record = network.executor.run(network.forwards(1), StepInputs(lambda _: microbatch, boundary))
    return network.whole(record.logits[0]).transpose(0, 1).float() if record.logits else None


def _shape(network: Network, logits: Tensor | None) -> tuple[int, ...]:
    """The sizes s and k of the logits, on stages without the head too."""
    sizes = torch.tensor([0, 0] if logits is None else logits.shape[1:], device=network.context.device)
    return tuple(network.share(sizes).tolist())


class Evaluator:
    """Scores ``eval.batches`` global batches of the validation split, the same samples in every evaluation.

    ``samples`` holds their indices, the same for every layout. Of a split smaller than one global batch all samples are
    scored. ``network`` is the model in training, and ``opens`` opens another split of ``data``.
    """

    def __init__(
        self, run: ResolvedRun, network: Network, data: DataSource, dataset: RunSamples, opens: Callable[..., Dataset]
    ) -> None:
        self._run, self._network, self._data, self._dataset = run, network, data, dataset
        train = run.config.train
        batches = min(len(dataset) // train.global_batch_size, run.config.eval.batches)
        drawn = range(batches * train.global_batch_size or len(dataset))
        self.samples = [sample_at(dataset, train.seed, position) for position in drawn]

        if run.config.eval.tasks and not network.model.predicts_next:
            raise InputError(f"eval.tasks scores next tokens, and {run.one('model')} does not predict them")
        if run.config.eval.tasks or run.config.eval.sample:
            network.check_angles()
        length = train.sequence_length
        opened = partial(opens, sequence_length=length)
        reader = TextReader(data, length, train.seed, network.context.vocab_size, opened)
        self._judge = data.judge("validation", train.sequence_length, train.seed)
        self._tasks = [make_work(task, reader) for task in run.config.eval.tasks]

    def tasks(self, step: int) -> list[EvalMetrics]:
        """Evaluate ``eval.tasks`` after ``step`` steps. Collective over the world."""
        if not self._tasks:
            return []
        self._network.context.groups.activity.enter("evaluate")
        set_training(self._network.chunks, training=False)
        results = [run_task(*task, self._network) for task in self._tasks]
        set_training(self._network.chunks, training=True)
        return [result.at_step(step) for result in results]

    def evaluate(self, step: int) -> EvalMetrics:
        """Score the model after ``step`` steps. Collective over the world."""
        self._network.context.groups.activity.enter("evaluate")
        set_training(self._network.chunks, training=False)
        train = self._run.config.train
        at_once = train.global_batch_size // (train.micro_batch_size * self._run.sizes.data)
        found = score_samples(self._network, self._dataset, self.samples, train.micro_batch_size, at_once)
        judged = self._judged()
        set_training(self._network.chunks, training=True)
        return EvalMetrics(step, "validation", found.loss, perplexity_of(found.loss), found.tokens, judged)

    def _judged(self) -> Mapping[str, float]:
        """The judgement of the data on the model's logits for its validation split; nothing where it judges nothing."""
        if self._judge is None:
            return {}
        names = [field.name for field in self._data.fields]
        size = self._run.config.train.micro_batch_size
        return dict(self._judge(answers(self._network, self._dataset, names, size).numpy()))


def set_training(chunks: Iterable[Chunk], *, training: bool) -> None:
    """Switch dropout on or off in every module of ``chunks``."""
    for chunk in chunks:
        chunk.train(training)


def generate_text(run: ResolvedRun, network: Network, data: DataSource) -> str | None:
    """Generate ``eval.sample`` tokens after ``eval.prompt``. Collective.

    Return None if the data is not text, or the model does not predict the next token.

    ``megatron-run generate --past-end --seed SEED``, with ``train.seed``, writes the same. Without a prompt the text
    begins after a line break, or where the tokenizer knows none, after the end of another text.
    """
    asked = run.config.eval
    prompt = data.encode_prompt(asked.prompt or "\n") if network.model.predicts_next else None
    if prompt is None:
        return None
    if not prompt and data.end_of_text is not None and data.end_of_text < network.context.vocab_size:
        prompt = [data.end_of_text]
    if not prompt:
        return None
    network.context.groups.activity.enter("generate")
    text = TextTokens(list(prompt))
    sampling = Sampling(temperature=asked.temperature, seed=run.config.train.seed)
    set_training(network.chunks, training=False)
    for _ in Generation(network, [text], sampling).steps():
        text.ended = len(text.tokens) >= len(prompt) + asked.sample
    set_training(network.chunks, training=True)
    return data.decode(text.tokens)


def why_no_text(run: ResolvedRun, network: Network, data: DataSource) -> str:
    """Return why :func:`generate_text` returned None, as a line for the user."""
    asked = run.config.eval
    nothing = f"eval.sample={asked.sample} generates nothing"
    if not network.model.predicts_next:
        return f"{nothing}: {run.one('model')} does not predict the next token"
    if data.encode(asked.prompt or "\n") is None:
        return f"{nothing}: the samples of {run.one('data')} are no text"
    return f"{nothing}: the tokenizer makes no token of eval.prompt={asked.prompt!r}; set one of words that it knows"
