"""Megatron-LM: its checkpoints are imported, its launch scripts become configurations. Nothing of either is executed.

Reading order: ``import_checkpoint`` (from a folder to ``Weights``), ``rank_files`` and ``torch_dist`` (the two layouts
on the disk, whose pickles are read without executing them), ``tensor_names`` (from their tensors to ours);
``launch_script`` (from the words of the training command to YAML).
"""

from __future__ import annotations

from pathlib import Path

from megatron_run.contracts import Format, PluginInfo, TranslatedScript, Weights
from megatron_run.hookspecs import hookimpl


class MegatronLM(Format):
    """Reads checkpoints of Megatron-LM and translates its launch scripts.

    Each method imports its half of the package: the one for checkpoints needs torch, the one for scripts does not.
    """

    files = "latest_checkpointed_iteration.txt, or mp_rank_* or metadata.json and common.pt"

    def recognises(self, source: Path) -> bool:
        """Whether ``source`` is a folder of Megatron's checkpoints, or one of its steps."""
        from megatron_run_format_megatron import import_checkpoint

        return import_checkpoint.is_checkpoint(source)

    def read(self, source: Path) -> Weights:
        """The model in a step's folder, or in the newest step of the folder of all."""
        from megatron_run_format_megatron import import_checkpoint

        return import_checkpoint.read(source)

    def translate_script(self, script: Path) -> TranslatedScript:
        """The configuration that the flags of a launch script ask for."""
        from megatron_run_format_megatron.launch_script.script import load_script
        from megatron_run_format_megatron.launch_script.translate import translate, yaml

        translation = translate(load_script(script), str(script))
        return TranslatedScript(yaml(translation, str(script)), (*translation.remarks, *translation.warnings))


@hookimpl
def megatron_run_plugin_info() -> PluginInfo:
    """Describe the plugin."""
    return PluginInfo("format", "megatron", provides=frozenset({"import", "launch-script"}))


@hookimpl
def megatron_run_create_format() -> Format:
    """Make the format."""
    return MegatronLM()
