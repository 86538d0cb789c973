"""Folders that ``transformers`` loads: ``config.json`` beside safetensors, of GPT-2, Llama, their relatives, and BERT.

Reading order: ``family`` (how a family of models is described), ``llama`` (the one that most others start from),
``sections`` (what several share), ``families`` (all of them), ``model_folder`` (reading and writing, safetensors in one
file or several), ``bert`` (of model=bert), ``hub`` (what lies at the Hub). A ``tokenizer.json``
travels with the model, unconverted.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from megatron_run.contracts import Fetched, Format, PluginInfo, Publisher, Wanted, Weights
from megatron_run.hookspecs import hookimpl
from megatron_run_format_huggingface import bert, model_folder
from megatron_run_format_huggingface.hub import download, upload
from megatron_run_format_huggingface.hub.names import SCHEME


class HuggingFace(Format):
    """Families of decoders as ``transformers`` saves them, and BERT."""

    files = "config.json and model.safetensors"
    scheme = SCHEME

    def recognises(self, source: Path) -> bool:
        """By ``config.json`` beside weights; pickled ones too, so that :meth:`read` can say why it refuses them."""
        return model_folder.is_model_folder(source)

    def read(self, source: Path) -> Weights:
        """The model in ``source``. Raises :class:`CheckpointError` with every reason why it has no counterpart here."""
        return bert.read(source) if bert.is_bert(source) else model_folder.read(source)

    def write(self, weights: Weights, folder: Path) -> None:
        """Write ``config.json`` and the weights. Raises :class:`InputError` where no family can hold the model."""
        (bert if weights.config.get("use") == "bert" else model_folder).write(weights, folder)

    def fetch(self, name: str, wanted: Wanted, tell: Callable[[str], None], before: Path | None = None) -> Fetched:
        """The files of ``ORG/NAME[@REVISION]`` of the Hub that are read. Raises a RunError for each failure."""
        return download.fetch(name, wanted, tell, before)

    def publisher(self, name: str) -> Publisher:
        """The repository ``ORG/NAME`` of the Hub. Raises :class:`InputError` without a token."""
        return upload.HubRepository(name, library="transformers")


@hookimpl
def megatron_run_plugin_info() -> PluginInfo:
    """Describe the plugin."""
    return PluginInfo("format", "huggingface", provides=frozenset({"import", "export", "fetch", "publish"}))


@hookimpl
def megatron_run_create_format() -> Format:
    """Make the format."""
    return HuggingFace()
