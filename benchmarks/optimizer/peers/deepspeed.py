"""DeepSpeed's engine with ZeRO, on CPUs over gloo."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec

import torch
from torch import Tensor

from benchmarks.optimizer.model import CLIP, Batch
from benchmarks.optimizer.ours import Ranks
from benchmarks.optimizer.peers.autograd import ADAMW, bytes_of, groups, logical, plain_model
from benchmarks.support.shape import Shape


def installed() -> bool:
    """Whether DeepSpeed can be imported."""
    return find_spec("deepspeed") is not None


class DeepSpeedSide:
    """The engine with ZeRO ``stage`` 1 or 3, and its defaults but for what is said here."""

    def __init__(self, ranks: Ranks, shape: Shape, batch: Batch, *, stage: int = 1) -> None:
        self._batch, self._stage = batch, stage
        os.environ["DS_ACCELERATOR"] = "cpu"  # looked up when DeepSpeed is imported
        os.environ.setdefault("LOCAL_RANK", os.environ.get("RANK", "0"))  # what its launcher would say
        deepspeed, operators = import_module("deepspeed"), import_module("deepspeed.ops")
        # It would be compiled now, and is for inference.
        operators.__compatible_ops__["deepspeed_shm_comm"] = False
        logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
        deepspeed.comm.init_distributed("gloo", dist_init_required=False, verbose=False)
        model, self._infos = plain_model(ranks, shape)
        self._engine, self._optimizer, *_ = deepspeed.initialize(
            model=model, optimizer=torch.optim.AdamW(groups(self._infos.items()), **ADAMW), config=_config(shape, stage)
        )

    def step(self) -> None:
        """The engine reduces after the last microbatch, clips, updates and gathers."""
        losses = list[Tensor]()
        for microbatch in self._batch:
            loss = self._engine(microbatch)
            self._engine.backward(loss)  # divides by the microbatches
            self._engine.step()
            losses.append(loss.detach())
        self.losses = torch.stack(losses)

    def first_moments(self) -> Mapping[str, Tensor]:
        """Put together by DeepSpeed from the partitions."""
        if self._stage < 3:
            # DeepSpeed has looked up its state after the update of the first group, when the others had none yet.
            self._optimizer._hp_optimizer_states_linked = False
            self._optimizer._lazy_init_hp_params_optimizer_state()
        whole = import_module("deepspeed.utils").safe_get_full_optimizer_state
        return logical((whole(parameter, "exp_avg"), info) for parameter, info in self._infos.items())

    def state_bytes(self) -> int:
        """Of this rank's partitions."""
        return bytes_of(self._optimizer.optimizer.state)


def _config(shape: Shape, stage: int) -> dict[str, object]:
    return {
        "train_micro_batch_size_per_gpu": shape.micro_batch,
        "gradient_accumulation_steps": shape.microbatches,
        "gradient_clipping": CLIP,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,  # torch's AdamW
        "steps_per_print": 10**9,
    }
