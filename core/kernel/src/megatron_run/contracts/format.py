"""The contract of kind ``format``: how other programs store models."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_run.contracts.parallel_layer import Adapters

#: What a format can do, listed in its ``PluginInfo.provides``; each needs the method named beside it.
IMPORT = "import"  # Format.read
EXPORT = "export"  # Format.write
LAUNCH_SCRIPT = "launch-script"  # Format.translate_script
ADAPTERS = "adapters"  # Format.read_adapters
FETCH = "fetch"  # Format.fetch
PUBLISH = "publish"  # Format.publisher
FORMAT_ABILITIES = (IMPORT, EXPORT, LAUNCH_SCRIPT, ADAPTERS, FETCH, PUBLISH)

#: What somebody wants of a name: the files of a model with its tokenizer, those of a tokenizer, or those of a dataset
#: for which a function says that they are read. It gets each file's path below the dataset.
Wanted = Literal["model", "tokenizer"] | Callable[[str], bool]

#: Reads one whole tensor into host memory. The result may be a view of a mapped file: do not write into it.
ReadTensor = Callable[[], "Tensor"]


@dataclass(frozen=True)
class AdapterWeights:
    """Adapters between two formats: ``how`` they act, and a reader for each A and B by its logical name.

    Each matrix may have a rank of its own, the number of rows of its A. ``base`` is the path or name by which another
    program knows the frozen model, empty where that is unknown.
    """

    how: Adapters
    tensors: Mapping[str, ReadTensor]
    base: str = ""


class ForeignAdapters(NamedTuple):
    """Adapters as another program saved them: of the model that it calls ``base``, empty where it does not say.

    ``upon`` gives them by our names, for the model that they adapt, of which it reads no values; it raises
    :class:`megatron_run.errors.CheckpointError` with every reason why they are not of that model.
    """

    base: str
    upon: Callable[[Weights], AdapterWeights]


@dataclass(frozen=True)
class Weights:
    """A model between two formats: its configuration, and a reader for each tensor, called when it is needed.

    ``config`` is the ``model`` section of a configuration, of ``model=gpt`` unless it has ``use``. ``tensors`` maps
    each logical name (``layers.0.attention.qkv.query.weight``) to its reader, which returns fp32, or the 16-bit type of
    the source: whoever takes the values widens them as it copies them. ``moments`` maps each field of an update rule
    (``exp_avg``) to readers by the same names; it is empty if the source has no optimizer state. ``step`` counts the
    updates so far. ``sequence_length`` is the model's longest sequence, None if the source does not limit it.
    ``tokenizer`` is the path of a tokenizer's folder or file, None if the source has none; ``special_tokens`` of a
    saved step are the ids of ``bos``, ``eos`` and ``pad`` that its tokenizer tells. ``files`` are other small files of
    the source by name: an import keeps them unread, and an export of the same weights hands them to its format.
    ``notes`` are lines for the user: what the conversion loses. ``adapters`` are those of a saved step that holds
    adapters: ``tensors`` are merged with them.
    """

    config: Mapping[str, object]
    tensors: Mapping[str, ReadTensor]
    step: int = 0
    sequence_length: int | None = None
    moments: Mapping[str, Mapping[str, ReadTensor]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    tokenizer: Path | None = None
    special_tokens: Mapping[str, int] = field(default_factory=dict)
    files: Mapping[str, Path] = field(default_factory=dict)
    adapters: AdapterWeights | None = None


class TranslatedScript(NamedTuple):
    """The configuration made from another trainer's launch script.

    ``yaml`` is the text of a configuration that resolves. ``warnings`` has one line for each difference between its run
    and the script's.
    """

    yaml: str
    warnings: tuple[str, ...]


class Fetched(NamedTuple):
    """A name's files on this machine: a ``folder``, and of a dataset the ``files`` in it that are read.

    ``name`` gives the same bytes on another day: it has the revision.
    """

    folder: Path
    name: str
    files: tuple[Path, ...] = ()


class Card(NamedTuple):
    """The words about a published model: Markdown without a title, and of which model it took the weights.

    ``base`` is the path or name of that model as it was imported, empty where it is unknown or there was none.
    """

    text: str
    base: str = ""


class Publisher(ABC):
    """A place that is ready to take a model."""

    @abstractmethod
    def readme(self, card: Card) -> str:
        """The content of ``README.md``, which is written into the folder before it is sent."""

    @abstractmethod
    def send(self, folder: Path) -> str:
        """Send the files of ``folder``; where they can be seen. Raises :class:`megatron_run.errors.RunError`."""


class Format(ABC):
    """Reads models from folders that another program wrote, writes them for another program, or both.

    A format serves one conversion (``megatron-run import SOURCE FOLDER --from NAME``, ``export --to NAME``), never a
    run, so it has no configuration section and no options. ``PluginInfo.provides`` lists its abilities: ``import``
    (:meth:`read`), ``export`` (:meth:`write`), ``launch-script`` (:meth:`translate_script`), ``adapters``
    (:meth:`read_adapters`), which a format of adapters has in the place of ``import``, ``fetch`` (:meth:`fetch`) and
    ``publish`` (:meth:`publisher`). Implement only the methods of these.

    The engine does the rest: it writes the imported folder with its configuration, checks that a ``gpt`` model is
    complete, verifies a saved step before its export, and renames a new folder into place once it is complete.

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

    Refuse with a :class:`megatron_run.errors.RunError` that lists every reason:
    :class:`~megatron_run.errors.CheckpointError` for a source that is damaged or has no counterpart here,
    :class:`~megatron_run.errors.InputError` for a model that the format cannot represent.
    """

    #: Why reading a source can execute code in its files, such as a pickle; such a source needs ``--trust-pickle``.
    #: Empty if it executes nothing.
    executes: str = ""
    #: What comes before the colon of the names that :meth:`fetch` takes: ``hf`` of ``hf:ORG/NAME``.
    scheme: str = ""

    @property
    @abstractmethod
    def files(self) -> str:
        """The files of this format, as messages name them: ``config.json and model.safetensors``."""

    @abstractmethod
    def recognises(self, source: Path) -> bool:
        """Whether ``source``, any path, is a folder of this format. Judged by file names alone."""

    def read(self, source: Path) -> Weights:
        """The model in ``source``. Reads headers at once, a tensor's values when its reader is called.

        Raises :class:`megatron_run.errors.CheckpointError` if the source is damaged, is of another format, or holds a
        model that has no counterpart here. Executes no code from the files unless :attr:`executes` says why.
        """
        raise NotImplementedError(f"{type(self).__name__} does not provide {IMPORT!r}")

    def write(self, weights: Weights, folder: Path) -> None:
        """Write the model into ``folder``, which is new and empty, with few tensors in memory at a time.

        Raises :class:`megatron_run.errors.InputError` with every reason why the format cannot represent this model.
        Moments may be left out, weights may not.
        """
        raise NotImplementedError(f"{type(self).__name__} does not provide {EXPORT!r}")

    def read_adapters(self, source: Path) -> ForeignAdapters:
        """The adapters in ``source``. Reads headers at once, a tensor's values when its reader is called.

        Raises :class:`megatron_run.errors.CheckpointError` if the source is damaged, is of another format, or holds
        adapters that have no counterpart here.
        """
        raise NotImplementedError(f"{type(self).__name__} does not provide {ADAPTERS!r}")

    def translate_script(self, script: Path) -> TranslatedScript:
        """The configuration equivalent to ``script``, which is read and never run. Needs no torch.

        Raises :class:`megatron_run.errors.InputError` if ``script`` is no launch script of that trainer.
        """
        raise NotImplementedError(f"{type(self).__name__} does not provide {LAUNCH_SCRIPT!r}")

    def fetch(self, name: str, wanted: Wanted, tell: Callable[[str], None], before: Path | None = None) -> Fetched:
        """The files that are ``wanted`` of ``name``, the part after the colon, on this machine; no others are fetched.

        What is there already is not fetched again, and where the place cannot be reached it serves. ``tell`` gets
        lines for the user. ``before`` is what the same name may have given when a run began: a name without a revision
        stands for that one then. Executes nothing. Raises :class:`megatron_run.errors.RunError` with what to type.
        """
        raise NotImplementedError(f"{type(self).__name__} does not provide {FETCH!r}")

    def publisher(self, name: str) -> Publisher:
        """The place ``name``, before there is anything to send.

        Raises :class:`megatron_run.errors.InputError` where nothing could be sent there.
        """
        raise NotImplementedError(f"{type(self).__name__} does not provide {PUBLISH!r}")
