"""The check of a plugin's options, whatever its kind."""

from __future__ import annotations

import json

from megatron_run.planning.choosing import dumped
from megatron_run.registry.loaded_plugin import Plugin
from megatron_run_testing import Check, CheckFailed


def option_checks(plugin: Plugin) -> tuple[Check, ...]:
    """That of the options of ``plugin``, which are set; none where it has no options."""
    options = plugin.options
    if options is None:
        return ()

    def survive() -> None:
        """A launcher hands them to its ranks as JSON, and a run folder keeps them."""
        try:
            written = json.dumps(dumped(plugin))
            read = plugin.options_model.model_validate_json(written)
        except (TypeError, ValueError) as cause:
            raise CheckFailed(f"options cannot be written as JSON and read again: {cause}") from cause
        if read != options:
            raise CheckFailed(f"written as {written} the options {options!r} are read as {read!r}")

    return (Check("options are read as they were written", survive),)
