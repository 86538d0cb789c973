"""Models from elsewhere, and for elsewhere: the half of a conversion that is the same for every format.

``convert`` has the two ways and asks plugins of kind ``format`` for the rest; ``weights`` is our side, a saved step;
``gpt_tensors`` tells formats which tensors a model ``gpt`` has. Plugins may import the last.

Imports: builtin, checkpoint, config, contracts, errors, registry, run_folder, runtime.
"""
