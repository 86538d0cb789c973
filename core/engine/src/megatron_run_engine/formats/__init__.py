"""Models from elsewhere, and for elsewhere: the half of a conversion that is the same for every format.

``convert`` has the two ways, and our side of both, a saved step; plugins of kind ``format`` do the rest.
``adapters`` has what differs for a step of adapters. ``gpt_tensors`` tells formats which tensors a model ``gpt`` has,
or one made from it; plugins may import it.

Imports: builtin, checkpoint, config, contracts, data, errors, files, lazy, registry, run_folder, runtime.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_run.lazy import typed_names

if TYPE_CHECKING:
    from megatron_run_engine.builtin.model.gpt_options import GptOptions as GptOptions
    from megatron_run_engine.formats.gpt_tensors import Shape as Shape
    from megatron_run_engine.formats.gpt_tensors import first_few as first_few
    from megatron_run_engine.formats.gpt_tensors import gpt_options as gpt_options
    from megatron_run_engine.formats.gpt_tensors import logical_shapes as logical_shapes
    from megatron_run_engine.formats.gpt_tensors import longest_sequence as longest_sequence
    from megatron_run_engine.formats.gpt_tensors import names_fault as names_fault
    from megatron_run_engine.formats.gpt_tensors import options_class as options_class
    from megatron_run_engine.formats.gpt_tensors import shapes_fault as shapes_fault

__getattr__, __dir__, __all__ = typed_names(__name__)
