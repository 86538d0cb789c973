"""Updates of a loaded model by hand: one batch, one backward, one update of AdamW."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from megatron_run.contracts import Microbatch
from megatron_run.errors import InputError
from megatron_run_engine.runtime.execute import StepInputs
from megatron_run_engine.runtime.gradients import main_grad, own_main_grad
from megatron_run_engine.runtime.losses import LANGUAGE_MODEL
from megatron_run_engine.runtime.parameter_init import describe_parameters, trained
from megatron_run_engine.training.build import Programs

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_run.planning import ResolvedRun
    from megatron_run_engine.runtime.generation import Network


class Stepper:
    """Trains ``network``, whole on this rank, in place; it keeps the moments. Dropout is off, weights do not decay.

    Raises :class:`InputError` for a model that several ranks share, and for 16-bit weights, which lose small updates.
    """

    def __init__(self, network: Network, run: ResolvedRun) -> None:
        why = "several ranks share it" if run.sizes.world > 1 else ""
        if run.config.train.precision != "fp32":
            why = f"its weights are {run.config.train.precision}, which rounds small updates away"
        if why:
            raise InputError(
                "this model cannot be stepped by hand", why=why, fix="start a run from it with run.init_from"
            )
        self._network, self._program = network, Programs(run, 0, "gloo").training(1)
        self._parameters: list[torch.nn.Parameter] = []
        for chunk in network.chunks:
            for parameter, info in trained(describe_parameters(chunk, 0)).items():
                own_main_grad(parameter)
                network.context.gradients.adopt(parameter, info.name)
                self._parameters.append(parameter)
        self._optimizer = torch.optim.AdamW(self._parameters, weight_decay=0.0)
        self._steps = 0

    def step(self, tokens: Tensor, lr: float) -> float:
        """One update on ``tokens`` [b, s + 1]; the loss before it, the mean over b s tokens in nats."""
        network, (rows, columns) = self._network, tokens.shape
        found: dict[str, tuple[Tensor, Tensor]] = {}
        fields = {"tokens": tokens[:, :-1], "labels": tokens[:, 1:]}
        fields["loss_mask"] = torch.ones_like(fields["labels"], dtype=torch.float32)
        microbatch = Microbatch(0, self._steps + 1, 0, fields, train=False)
        for parameter in self._parameters:
            main_grad(parameter).zero_()
        network.context.gradients.start_step(1, _ignore)
        boundary = partial(network.model.boundary, micro_batch_size=rows, sequence_length=columns - 1)
        inputs = StepInputs(
            microbatch=lambda _: microbatch,
            boundary=boundary,
            report=lambda _, name, total, weight: found.__setitem__(name, (total, weight)),
            seed=lambda name, weight: 1 / weight if name == LANGUAGE_MODEL else torch.ones_like(weight),
        )
        network.executor.run(self._program, inputs)
        for parameter in self._parameters:
            parameter.grad = main_grad(parameter)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()
        for parameter in self._parameters:
            parameter.grad = None  # or the hook would find it at the next backward
        self._steps += 1
        total, weight = found[LANGUAGE_MODEL]
        return float(total / weight)


def _ignore(_: object) -> None:
    """No optimizer of ours waits for a gradient."""
