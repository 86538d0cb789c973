"""Models from elsewhere, and for elsewhere: the half of a conversion that is the same for every format.

``convert`` has the two ways, and our side of both, a saved step; plugins of kind ``format`` do the rest.
``adapters`` has what differs for a step of adapters. ``gpt_tensors`` tells formats which tensors a model ``gpt`` has,
or one made from it; plugins may import it.

Imports: builtin, checkpoint, config, contracts, data, errors, files, registry, run_folder, runtime.
"""
