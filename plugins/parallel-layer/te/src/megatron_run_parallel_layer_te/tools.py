"""The shared ingredients of this plugin's layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatron_run_engine.nn import build_device

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_run_engine.nn.parallel import Split
    from megatron_run_engine.runtime.context import BuildContext
    from megatron_run_parallel_layer_te.library import Engine
    from megatron_run_parallel_layer_te.precision import Options, Precision


@dataclass(frozen=True)
class Tools:
    """Transformer Engine, the ranks over which its modules are split, and their options and precision."""

    context: BuildContext
    split: Split
    engine: Engine
    options: Options
    precision: Precision

    @property
    def device(self) -> str:
        """The device of new parameters, as a string, since modules compare it with ``"meta"``."""
        return str(build_device(self.context))

    def splitting(self) -> dict[str, Any]:
        """The arguments that describe the ranks over which a module is split.

        No tracker of random states is passed: modules draw from the device's default generator, which the engine
        positions before each segment, differently on every rank.
        """
        peers = self.split.peers
        return {
            "tp_group": peers.group,
            "tp_size": peers.size,
            "sequence_parallel": self.split.sequence,
            "get_rng_state_tracker": None,
        }

    def product(self) -> dict[str, Any]:
        """The arguments of every matrix product."""
        return {
            **self.splitting(),
            "params_dtype": self.context.dtypes.param,
            "device": self.device,
            "init_method": _leave,
            "fuse_wgrad_accumulation": self.options.fuse_weight_gradients,
            "delay_wgrad_compute": self.options.delay_weight_gradients,
        }


def _leave(weight: Tensor) -> Tensor:
    """Leave the weight uninitialised: the engine fills every parameter by its name."""
    return weight
