"""This project's training: the trainer as a user gets it, and a bare loop over the same modules."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.single.loop import adamw
from benchmarks.single.model import CLIP_NORM, LEARNING_RATE, WEIGHT_DECAY, Batch, Precision, Side, Weights
from benchmarks.support.shape import Shape
from megatron_run import load_config
from megatron_run.contracts import CheckpointMetrics, Microbatch, Observer, StepMetrics
from megatron_run.contracts.schedule import LayoutSpec, looped_layout
from megatron_run.errors import ExitCode
from megatron_run_engine.builtin.model.gpt import Gpt, GptOptions
from megatron_run_engine.builtin.parallel_layer.dense import DenseLayers
from megatron_run_engine.data.batches import SampleStream
from megatron_run_engine.host.process import chosen_kernels
from megatron_run_engine.run_folder import RunFolder
from megatron_run_engine.runtime.context import BuildContext, Dtypes
from megatron_run_engine.runtime.gradients import main_grad
from megatron_run_engine.runtime.world import StopRequest, World
from megatron_run_engine.training.build import build
from megatron_run_engine.training.observers import start_observers
from megatron_run_engine.training.trainer import Trainer
from megatron_run_testing.build_contexts import logical_values, prepare, single_process_context

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
#: More steps than are ever taken.
ENDLESS = 10**9


class _LastLoss(Observer):
    """Keeps the loss of the last step."""

    value: float | None = None

    def on_step_end(self, metrics: StepMetrics) -> None:
        """One more step."""
        self.value = metrics.loss


class OurTraining(Side):
    """The trainer with a run folder and the default observers but the console, one step at a time.

    It was asked to stop before it began, so that it hands back after each step; asked to train again, it goes on.
    """

    def __init__(
        self,
        shape: Shape,
        precision: Precision,
        device: str = "cpu",
        sets: Mapping[str, Any] | None = None,
        plugins: Sequence[str] = (),
    ) -> None:
        self._loss = _LastLoss()
        run = load_config(configuration(shape, precision), plugins=[*plugins, self._loss], sets=sets or {})
        self._folder = tempfile.TemporaryDirectory()
        folder, stop = RunFolder(Path(self._folder.name), 1), StopRequest()
        stop.stop(ExitCode.SIGTERM)
        place = "cpu" if device == "cpu" else f"{device}:0"
        assembly = build(run, World(device=place, backend="gloo" if device == "cpu" else "nccl"))
        self._trainer = Trainer(run, assembly, folder, stop)
        # A run saves when it is stopped.
        self._trainer._checkpoints.after_step = _save_nothing  # type: ignore[method-assign]
        self._trainer.resume()
        self._observers = start_observers(run, assembly, folder, self._trainer.beginning)
        self._samples = SampleStream(self._trainer._dataset, run.config.train.seed)
        self._shape, self._device = shape, device
        self.flops_per_token = assembly.flops_per_token
        self.planned = sum(assembly.optimizer.memory().values())

    @property
    def replays(self) -> bool:
        """Whether steps replay graphs by now."""
        graphs = self._trainer._graphs
        return graphs is not None and graphs.replays

    def batch(self, step: int) -> Batch:
        """The input of step ``step``, counted from 0: the other sides get the same."""
        size, first = self._shape.micro_batch, step * self._shape.micro_batch * self._shape.microbatches
        starts = (first + index * size for index in range(self._shape.microbatches))
        names = ("tokens", "labels")
        found = (self._samples.fields(range(start, start + size), names, torch.device("cpu")) for start in starts)
        return [(fields["tokens"], fields["labels"]) for fields in found]

    def step(self, batch: Batch) -> float:
        """One step, which loads its own data."""
        with chosen_kernels(None, self._device):  # as a run does when it starts; the other sides run without
            self._trainer.train(self._observers)
        assert self._loss.value is not None  # every step has a loss
        return self._loss.value

    def close(self) -> None:
        """Close the observers' files, and delete them."""
        self._observers.on_train_end("finished")
        self._folder.cleanup()


def _save_nothing(*_: object, **__: object) -> list[CheckpointMetrics]:
    return []


def configuration(shape: Shape, precision: Precision) -> dict[str, Any]:
    """Everything that is not the network or the update stands at its default."""
    samples = shape.micro_batch * shape.microbatches
    return {
        "run": {"device": "cpu"},
        "model": _options(shape),
        "train": {
            "steps": ENDLESS,
            "sequence_length": shape.sequence,
            "micro_batch_size": shape.micro_batch,
            "global_batch_size": samples,
            "precision": precision,
            "lr": LEARNING_RATE,
            "lr_shape": "constant",
            "lr_warmup": 0,
            "weight_decay": WEIGHT_DECAY,
            "clip_norm": CLIP_NORM,
        },
        "data": {"use": "mock", "vocab_size": shape.vocab},
        "eval": {"interval": 0},
        "observer": {"use": ["jsonl", "tensorboard"]},
    }


def _options(shape: Shape) -> dict[str, Any]:
    return {
        "num_layers": shape.layers,
        "hidden_size": shape.hidden,
        "num_heads": shape.heads,
        "vocab_size": shape.vocab,
        "dropout": 0.0,
    }


class BareLoop(Side):
    """A textbook loop over our modules: no executor, no optimizer plugin, no scaler, no data, nobody who watches.

    In bf16 the masters are fp32 copies of the weights, which are updated by the gradients in ``main_grad``.
    """

    def __init__(self, shape: Shape, precision: Precision) -> None:
        context = _context(shape, precision)
        assert isinstance(context.model, GptOptions)
        layout = looped_layout(LayoutSpec(1, 1, shape.layers))
        self._chunk = Gpt(context, context.model).build_chunk(0, layout, DenseLayers(context), {})
        self._infos = prepare(context, [self._chunk])
        self._parameters, self._gradients = list[Tensor](self._infos), [main_grad(p) for p in self._infos]
        # of fp32 weights the weights themselves
        self._masters: list[Tensor] = [nn.Parameter(p.detach().float()) for p in self._infos]
        self._update = adamw(self._masters)
        self._mask = torch.ones(shape.micro_batch, shape.sequence)

    @property
    def weights(self) -> Weights:
        """The values by canonical name."""
        return logical_values(self._infos)

    def step(self, batch: Batch) -> float:
        """One step."""
        torch._foreach_zero_(self._gradients)
        losses = [self._accumulate(index, len(batch), *pair) for index, pair in enumerate(batch)]
        for master, gradient in zip(self._masters, self._gradients, strict=True):
            master.grad = gradient
        nn.utils.clip_grad_norm_(self._masters, CLIP_NORM)
        self._update.step()
        self._refresh()
        return torch.stack(losses).sum().item()

    def _accumulate(self, index: int, microbatches: int, tokens: Tensor, labels: Tensor) -> Tensor:
        fields = {"tokens": tokens, "labels": labels, "loss_mask": self._mask}
        total, weight = self._chunk(None, Microbatch(index, 1, index * len(tokens), fields)).losses["lm"]
        share = 1 / (weight * microbatches)
        total.backward(share)
        return total.detach() * share

    def _refresh(self) -> None:
        """Round the masters to the weights, where these are others."""
        if self._parameters[0].dtype != self._masters[0].dtype:
            with torch.no_grad():
                torch._foreach_copy_(self._parameters, self._masters)


def _context(shape: Shape, precision: Precision) -> BuildContext:
    train = {"sequence_length": shape.sequence, "micro_batch_size": shape.micro_batch}
    train["global_batch_size"] = shape.micro_batch * shape.microbatches
    context = single_process_context(GptOptions(**_options(shape)), dtype=torch.float32, train=train)
    return replace(context, dtypes=Dtypes(param=DTYPES[precision], main=torch.float32))
