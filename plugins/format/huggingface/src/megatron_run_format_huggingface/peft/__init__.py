"""Adapters as PEFT saves them: ``adapter_config.json`` beside ``adapter_model.safetensors``, of the families here.

They go through the tables that the weights go through, so both are a format of one package. ``config`` reads and writes
what they do, ``matrices`` the A and B of each matrix.
"""

from __future__ import annotations

from pathlib import Path

from megatron_run.contracts import ForeignAdapters, Format, PluginInfo, Publisher, Weights
from megatron_run.errors import InputError
from megatron_run.hookspecs import hookimpl
from megatron_run_engine.checkpoint import FileSystem, followed, write_tensors
from megatron_run_format_huggingface.hub.upload import HubRepository
from megatron_run_format_huggingface.model_folder import METADATA, read_json, write_json
from megatron_run_format_huggingface.peft import config, matrices


class Peft(Format):
    """Low-rank adapters of models that have a counterpart at Hugging Face."""

    files = f"{config.CONFIG} and {matrices.FILE}"

    def recognises(self, source: Path) -> bool:
        """By ``adapter_config.json`` alone, so that :meth:`read_adapters` can say what is missing beside it."""
        return (source / config.CONFIG).is_file()

    def read_adapters(self, source: Path) -> ForeignAdapters:
        """The adapters in ``source``. Raises :class:`CheckpointError` with every reason why we have none like them."""
        described = config.read(read_json(followed(source / config.CONFIG)), source / config.CONFIG)
        file = matrices.open_file(source)
        return ForeignAdapters(described.base, lambda weights: matrices.read(file, described, weights))

    def write(self, weights: Weights, folder: Path) -> None:
        """Write the adapters of a saved step, in fp32.

        Raises :class:`InputError` for a step that holds all weights, and as an export of the model does.
        """
        if weights.adapters is None:
            raise InputError(
                "the step to be exported holds all weights, and no adapters",
                why="it was not trained with parallel-layer=dense+lora",
                fix="name the run that was, before the folder, or write the model: --to huggingface",
            )
        files, found = FileSystem(), matrices.write(weights, weights.adapters)
        write_tensors(folder / matrices.FILE, found.tensors, files, METADATA)
        write_json(folder / config.CONFIG, config.write(weights, weights.adapters, found), files)
        files.sync_folder(folder)

    def publisher(self, name: str) -> Publisher:
        """The repository ``ORG/NAME`` of the Hub. Raises :class:`InputError` without a token."""
        return HubRepository(name, library="peft")


@hookimpl
def megatron_run_plugin_info() -> PluginInfo:
    """Describe the plugin."""
    return PluginInfo("format", "peft", provides=frozenset({"export", "adapters", "publish"}))


@hookimpl
def megatron_run_create_format() -> Format:
    """Make the format."""
    return Peft()
