"""The contract of kind ``format``: how models are stored elsewhere."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

#: The abilities of a format, which it lists in ``PluginInfo.provides``: each stands for the method named beside it.
IMPORT = "import"  # Format.read
EXPORT = "export"  # Format.write
LAUNCH_SCRIPT = "launch-script"  # Format.translate_script
FORMAT_ABILITIES = (IMPORT, EXPORT, LAUNCH_SCRIPT)

#: Reads one whole tensor onto the host. The result may share memory with a file, so nobody writes into it.
ReadTensor = Callable[[], "Tensor"]


@dataclass(frozen=True)
class Weights:
    """The intermediate form of every conversion: a model under our names, each tensor read when it is needed.

    ``config`` is the ``model`` section of a configuration; ``use`` is ``gpt`` unless it says otherwise. ``tensors``
    maps each logical name (``layers.0.attention.qkv.query.weight``) to what reads it in fp32. ``moments`` maps each
    field of an update rule (``exp_avg``) to readers by the same names; empty where the optimizer's state is unknown.
    ``step`` counts the updates so far. ``sequence_length`` is the longest sequence that the model knows, None where
    nothing tells. ``tokenizer`` is its JSON file of the `tokenizers` library, where it is known. ``notes`` are lines
    for the user: what the source holds and this form cannot.
    """

    config: Mapping[str, object]
    tensors: Mapping[str, ReadTensor]
    step: int = 0
    sequence_length: int | None = None
    moments: Mapping[str, Mapping[str, ReadTensor]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    tokenizer: Path | None = None


class TranslatedScript(NamedTuple):
    """A launch script of another trainer as our configuration.

    ``yaml`` is a configuration file that resolves. ``warnings`` has one line for each way in which its run will differ
    from the script's.
    """

    yaml: str
    warnings: tuple[str, ...]


class Format(ABC):
    """Reads models from folders that another program wrote, writes them for another program, or both.

    A format is chosen for one conversion (``megatron-run import SOURCE FOLDER --from NAME``, ``export --to NAME``) and
    never for a run, so it has no section in a configuration and no options. ``PluginInfo.provides`` lists what it can
    do: ``import`` (:meth:`read`), ``export`` (:meth:`write`), ``launch-script`` (:meth:`translate_script`). It leaves
    out the methods of what it cannot do.

    The engine owns the rest: it writes the imported folder with its configuration, checks that a model ``gpt`` is
    complete, verifies a saved step before it is exported, and lets a new folder appear only when it is whole.

    A whole working plugin, which keeps a model as a folder of NumPy arrays::

        class Arrays(Format):
            files = "model.json and *.npy"

            def recognises(self, source):
                return (source / "model.json").is_file() and any(source.glob("*.npy"))

            def read(self, source):
                try:
                    about = json.loads((source / "model.json").read_text())
                    tensors = {path.stem: partial(read_array, path) for path in source.glob("*.npy")}
                    return Weights(about["model"], tensors, sequence_length=about["sequence_length"])
                except (OSError, ValueError, KeyError, TypeError) as error:
                    raise CheckpointError(f"{source} cannot be read", why=str(error)) from error

            def write(self, weights, folder):
                for name, read in weights.tensors.items():
                    np.save(folder / f"{name}.npy", read().numpy())
                about = {"model": dict(weights.config), "sequence_length": weights.sequence_length}
                (folder / "model.json").write_text(json.dumps(about))

        def read_array(path):
            try:
                return torch.from_numpy(np.load(path))
            except (OSError, ValueError, EOFError) as error:
                raise CheckpointError(f"{path} cannot be read", why=str(error)) from error

        @hookimpl
        def megatron_run_plugin_info():
            return PluginInfo("format", "arrays", provides=frozenset({"import", "export"}))

        @hookimpl
        def megatron_run_create_format():
            return Arrays()

    Every refusal is a :class:`megatron_run.errors.RunError`: :class:`~megatron_run.errors.CheckpointError` for a source
    that is damaged or has no counterpart here, :class:`~megatron_run.errors.InputError` for a model that the format
    cannot hold. It gives every reason at once.
    """

    #: Why reading a source executes what its files say; empty where it does not. Then only ``--trust-pickle`` reads it.
    executes: str = ""

    @property
    @abstractmethod
    def files(self) -> str:
        """What lies in a folder of this format, for messages: ``config.json and model.safetensors``."""

    @abstractmethod
    def recognises(self, source: Path) -> bool:
        """Whether the files in ``source`` are of this format. Looks at names only; ``source`` may be anything."""

    def read(self, source: Path) -> Weights:
        """The model in ``source``. Headers are read now, values when a tensor is asked for.

        Raises :class:`megatron_run.errors.CheckpointError` for a source that is damaged, is of another format, or holds
        a model that has no counterpart here. Executes nothing that the files say, unless :attr:`executes` warns of it.
        """
        raise NotImplementedError(f"{type(self).__name__} does not provide {IMPORT!r}")

    def write(self, weights: Weights, folder: Path) -> None:
        """Write the model into ``folder``, which is new and empty. Should hold few tensors in memory at once.

        Raises :class:`megatron_run.errors.InputError` with every reason why the format cannot hold this model. Moments
        may be left out; a weight may not.
        """
        raise NotImplementedError(f"{type(self).__name__} does not provide {EXPORT!r}")

    def translate_script(self, script: Path) -> TranslatedScript:
        """The configuration that a launch script of the other trainer asks for. Reads the script, never runs it.

        Raises :class:`megatron_run.errors.InputError` for a file that is no such script. Works without torch.
        """
        raise NotImplementedError(f"{type(self).__name__} does not provide {LAUNCH_SCRIPT!r}")
