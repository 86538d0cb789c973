"""The ground of one rank: the executor, its messages, gradients, collectives, random streams, metrics.

``generation`` adds tokens to texts, one forward a token.

Imports: contracts, errors, lazy, pipeline.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_run.lazy import typed_names

if TYPE_CHECKING:
    from megatron_run_engine.runtime.comm import ParallelGroup as ParallelGroup
    from megatron_run_engine.runtime.comm import Pending as Pending
    from megatron_run_engine.runtime.context import BuildContext as BuildContext
    from megatron_run_engine.runtime.context import Dtypes as Dtypes
    from megatron_run_engine.runtime.gradients import GradientAccumulator as GradientAccumulator
    from megatron_run_engine.runtime.gradients import main_grad as main_grad
    from megatron_run_engine.runtime.operands import tensors_in as tensors_in
    from megatron_run_engine.runtime.operands import with_tensors as with_tensors
    from megatron_run_engine.runtime.parameter_init import canonical as canonical
    from megatron_run_engine.runtime.sample_cut import gathered as gathered
    from megatron_run_engine.runtime.sample_cut import held as held
    from megatron_run_engine.runtime.sample_cut import joined as joined
    from megatron_run_engine.runtime.transformer_engine import Need as Need
    from megatron_run_engine.runtime.transformer_engine import import_transformer_engine as import_transformer_engine
    from megatron_run_engine.runtime.transformer_engine import installed_version as installed_version

__getattr__, __dir__, __all__ = typed_names(__name__)
