"""The registry of plugins: finds, chooses and loads them.

``discover`` reads installed metadata and imports nothing; ``choose`` picks one entry; ``load`` imports it, registers
its hooks and returns a :class:`~megatron_run.registry.loaded_plugin.Plugin`, whose ``create`` makes the object that a
run uses. ``commands`` and ``loaded_command`` do so for what packages add to ``megatron-run``.

Imports: config, contracts, errors, hookspecs.
"""
