"""Whether the ranks that a launcher starts on the processors of this machine find memory there."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

from megatron_run.contracts import ModelOptions

if TYPE_CHECKING:
    from megatron_run.planning import ResolvedRun
    from megatron_run_engine.estimate.model_size import ModelSize

#: Bytes of a parameter, and of all that training keeps for it, at most.
_MOST = 32
_GIB = 2**30


def lacks_memory(run: ResolvedRun, size: ModelSize) -> str:
    """The line that says so where the ranks of ``run``, of this ``size``, need more than there is; else empty.

    Activations and messages come on top of what is counted.
    """
    stages = [sum(stage.memory.values()) for stage in size.stages]
    needed, ranks = sum(stages) * run.sizes.world // len(stages), run.sizes.world
    there = _memory()
    if needed <= there:
        return ""
    each = f"a rank needs {_amount(max(stages))}" + (f", {ranks} of them {_amount(needed)}" if ranks > 1 else "")
    return f"{each}, and this machine has {_amount(there)}"


def known_to_lack_memory(run: ResolvedRun) -> str:
    """As :func:`lacks_memory` before a start; a model that is far too small to lack any is not counted."""
    options = run.one("model").options
    assert isinstance(options, ModelOptions)  # planning has checked them
    costs = options.costs(run.config.train.sequence_length, options.vocab_size or 1)
    if costs.parameters * _MOST * run.sizes.world < _memory():
        return ""
    from megatron_run_engine.estimate.model_size import model_size

    try:
        return lacks_memory(run, model_size(run))
    except Exception as unknown:  # a model that needs its device to be built; what is wrong with it, ranks say
        logging.getLogger("megatron_run").debug("the memory was not counted in advance", exc_info=unknown)
        return ""


def _memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _amount(size: float) -> str:
    return f"{size / _GIB:,.1f} GiB"
