"""The contract of kind ``data``: samples."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

Split = Literal["train", "validation", "test"]


@dataclass(frozen=True)
class Field:
    """A field of a sample: its name, the name of its NumPy ``dtype``, and its ``shape``.

    A size is a number, ``"s"`` for the sequence length, or None for one that the data chooses, the same for all samples
    of a split, since shapes must not change while a run trains. A batch stacks samples: [b, *shape].
    """

    name: str
    dtype: str = "int64"
    shape: tuple[int | Literal["s"] | None, ...] = ("s",)

    def __str__(self) -> str:
        return f"{self.name} {self.dtype} [{', '.join('?' if size is None else str(size) for size in self.shape)}]"

    def fits(self, dtype: str, shape: tuple[int, ...], sequence_length: int) -> bool:
        """Whether an array of ``dtype`` and ``shape`` is this field of a sample of ``sequence_length`` tokens."""
        sizes = [sequence_length if size == "s" else size for size in self.shape]
        return (
            dtype == self.dtype
            and len(shape) == len(sizes)
            and all(size in (None, found) for size, found in zip(sizes, shape, strict=True))
        )


#: Of every sample. ``labels[i]`` is the token after ``tokens[i]``; it counts as ``loss_mask[i]`` says, 0 or 1.
TOKENS, LABELS, LOSS_MASK = Field("tokens"), Field("labels"), Field("loss_mask", "float32")
#: The place of each token in its document, from 0.
POSITIONS = Field("positions")
#: Where the documents of a row begin and end: document i is columns ``documents[i]`` to ``documents[i+1] - 1``. It
#: begins with 0, never falls and ends with s, so padding is a document too; repeated values are documents of no tokens,
#: which fill it up to one size. Data that has this field is attended to within documents alone, or refused.
DOCUMENTS = Field("documents", shape=(None,))
#: The fields that have a meaning here, by name. A model and its data may agree on others.
FIELDS: Mapping[str, Field] = MappingProxyType(
    {field.name: field for field in (TOKENS, LABELS, LOSS_MASK, POSITIONS, DOCUMENTS)}
)


def as_fields(named: Iterable[str | Field]) -> tuple[Field, ...]:
    """``named``, where a name stands for the field of :data:`FIELDS`, or else for token ids of that name, [s]."""
    return tuple(FIELDS.get(each, Field(each)) if isinstance(each, str) else each for each in named)


#: Metrics by name, from a model's logits [n, ...] for all n samples of a split, in their order.
Judge = Callable[["NDArray[np.float32]"], Mapping[str, float]]


class Recipe(NamedTuple):
    """How a model is fine-tuned on a task: a ``summary`` of one line, ``model`` and ``train`` as configured sections.

    The keys of ``model`` are laid over those of the model that was saved, ``train`` is the whole section.
    """

    summary: str
    model: Mapping[str, Any]
    train: Mapping[str, Any]


class Dataset(Protocol):
    """An indexable set of samples of equal length, in an order that never changes."""

    def __len__(self) -> int:
        """Number of samples."""
        ...

    def __getitem__(self, index: int) -> Mapping[str, NDArray[np.generic]]:
        """Sample ``index``: ``tokens`` and ``labels`` int64 [s], ``loss_mask`` fp32 [s], what else is declared.

        Its arrays keep their values when another is read, so none is a buffer for the next; they may share memory.
        """
        ...


class DataSource(ABC):
    """Opens the datasets of a run.

    Every rank creates the source at start-up, so its constructor must be cheap; files are read when a split is opened.
    Data must depend only on the options and the arguments, never on the rank, nor on ``hash`` of a text, which differs
    among processes: the trainer distributes samples by index.

    A whole working plugin::

        class Ones(DataSource):
            vocab_size = 2

            def dataset(self, split, sequence_length, seed):
                return [{"tokens": np.ones(sequence_length, int), "labels": np.ones(sequence_length, int),
                         "loss_mask": np.ones(sequence_length, "float32")}]

        @hookimpl
        def megatron_run_create_data(options):
            return Ones()
    """

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """Number of token ids, unpadded."""

    @property
    def rows(self) -> int:
        """The least ids that a model must know: fewer than ``vocab_size`` where only a token's own name gives the last.

        A sample that holds one of those that the model lacks is refused when it is read.
        """
        return self.vocab_size

    @property
    def fields(self) -> tuple[Field, ...]:
        """The fields of every sample. More than the default are read by the stages whose model asks for them."""
        return (TOKENS, LABELS, LOSS_MASK)

    @abstractmethod
    def dataset(self, split: Split, sequence_length: int, seed: int) -> Dataset:
        """Open ``split``, with samples of ``sequence_length`` tokens in an order that depends on ``seed``.

        Raises :class:`megatron_run.errors.DataError` with file and offset if the data cannot be read.
        """

    def stream(self, split: Split, sequence_length: int, seed: int, samples: int) -> Dataset | None:
        """Open ``split`` in an order of its own, or return None: then the trainer shuffles :meth:`dataset` each epoch.

        The sample at index i is the i-th that the run reads; the length is that of one epoch, and indices beyond it go
        on with the next. ``samples`` is how many the run will read. Raises as :meth:`dataset`.
        """
        return None

    def summary(self, sequence_length: int, seed: int) -> str:
        """A line about the training split that is printed at the start of a training, empty for none."""
        return ""

    def baselines(self, sequence_length: int, seed: int, samples: Sequence[int]) -> Mapping[str, float]:
        """Losses of simple models by name, in nats per token, on ``samples`` of the validation split; empty by default.

        The model is evaluated on the same samples, so its loss can be compared with these.
        """
        return {}

    def judge(self, split: Split, sequence_length: int, seed: int) -> Judge | None:
        """How well a model answers the samples of ``split``, beyond its loss; None by default.

        Where there is one, every evaluation asks the model for its logits of all samples, without labels, and reports
        the metrics beside the loss.
        """
        return None

    def recipe(self, model: Mapping[str, Any], sequence_length: int) -> Recipe | None:
        """How a saved ``model``, trained at ``sequence_length``, is fine-tuned on these samples; None by default.

        ``megatron-run finetune --task`` trains so. Raises :class:`megatron_run.errors.InputError` for a model that
        cannot be.
        """
        return None

    @property
    def files(self) -> tuple[Path, ...]:
        """The files that samples are made from, in an order that matters; empty by default.

        Their contents are recorded with every saved step, and a run does not go on with others. Of data without files
        some samples alone are compared.
        """
        return ()

    @property
    def tokenizer_file(self) -> Path | None:
        """The tokenizer's file, a JSON file of the `tokenizers` library or a SentencePiece model; None without one.

        It is kept beside the weights, and weights that were trained with another one are refused.
        """
        return None

    def encode(self, text: str) -> Sequence[int] | None:
        """Token ids of ``text``, or None if the data is not text."""
        return None

    def encode_prompt(self, text: str) -> Sequence[int] | None:
        """Token ids of ``text`` as a model is given it: with those that the tokenizer puts around every text."""
        return self.encode(text)

    def decode(self, tokens: Sequence[int]) -> str | None:
        """The text of ``tokens``, or None if the data is not text."""
        return None

    @property
    def special_tokens(self) -> Mapping[str, tuple[str, int]]:
        """Text and id of the tokens that have a part of their own, by the names of Hugging Face, such as ``bos``."""
        return {}

    def chat_template(self, *, tools: bool = False) -> str | None:
        """The Jinja source that renders conversations for the model, those with ``tools`` or without; None: none.

        Its variables are those of transformers. Raises :class:`megatron_run.errors.DataError` if it cannot be read.
        """
        return None

    @property
    def end_of_text(self) -> int | None:
        """The token that ends a document, None if there is none."""
        return None
