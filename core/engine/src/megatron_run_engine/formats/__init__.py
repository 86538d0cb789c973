"""Models from elsewhere, and for elsewhere: each format is one file that reads into ``Weights`` or writes them.

Reading order: ``weights`` (what every format meets in), ``formats`` (the table of formats), ``folder`` (our side), then
a format.

Imports: builtin, checkpoint, config, contracts, errors, planning, registry, run_folder, runtime, training.
"""
