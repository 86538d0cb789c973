"""What every layer of this plugin is made with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatron_run_engine.nn import build_device

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_run_engine.nn.parallel import Split
    from megatron_run_engine.runtime.context import BuildContext
    from megatron_run_parallel_layer_te.engine import Engine
    from megatron_run_parallel_layer_te.options import Options
    from megatron_run_parallel_layer_te.precision import Precision


@dataclass(frozen=True)
class Tools:
    """Transformer Engine, among which ranks its modules split, and how they compute."""

    context: BuildContext
    split: Split
    engine: Engine
    options: Options
    precision: Precision

    @property
    def device(self) -> str:
        """Where parameters are made; a word, since modules compare it with ``"meta"``."""
        return str(build_device(self.context))

    def splitting(self) -> dict[str, Any]:
        """The arguments by which a module learns of the ranks that share it.

        There is no tracker of random states: the kernel positions the device's default generator, from which modules
        draw, before each segment and differently on every rank.
        """
        peers = self.split.peers
        return {
            "tp_group": peers.group,
            "tp_size": peers.size,
            "sequence_parallel": self.split.sequence,
            "get_rng_state_tracker": None,
        }

    def product(self) -> dict[str, Any]:
        """The arguments that every matrix product takes."""
        return {
            **self.splitting(),
            "params_dtype": self.context.dtypes.param,
            "device": self.device,
            "init_method": _leave,
            "fuse_wgrad_accumulation": self.options.fuse_weight_gradients,
            "delay_wgrad_compute": self.options.delay_weight_gradients,
        }


def _leave(weight: Tensor) -> Tensor:
    """Initialise nothing: the kernel fills every parameter by its name."""
    return weight
