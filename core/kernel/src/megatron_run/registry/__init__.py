"""Finding, choosing and loading plugins. Imports contracts, hook specifications, config and errors only.

``discover`` reads installed metadata and imports nothing; ``choose`` picks one entry; ``load`` imports it, registers
its hooks and returns a :class:`~megatron_run.registry.plugin.Plugin`, whose ``create`` makes the object that a run
uses.
"""
