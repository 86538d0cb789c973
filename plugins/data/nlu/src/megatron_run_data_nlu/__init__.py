"""data=nlu: the tasks on which the Megatron-LM paper fine-tunes BERT, from their published files.

Reading order: ``questions`` (files), ``rows`` (samples), ``metrics`` (what logits are worth), here the
source, ``recipes`` (table 6 of the paper).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from megatron_run.contracts import DataSource, Judge, PluginInfo, Recipe, Split
from megatron_run.contracts.data import LABELS, LOSS_MASK, TOKENS
from megatron_run.contracts.data import Field as BatchField
from megatron_run.contracts.option_groups import OF_FILES
from megatron_run.errors import DataError, InputError
from megatron_run.hookspecs import hookimpl
from megatron_run_data_nlu.official_metrics import accuracy, answers_of, binary_f1, squad
from megatron_run_data_nlu.questions import TaskName, files_of, read_choices, read_questions
from megatron_run_data_nlu.recipes import published
from megatron_run_data_nlu.rows import Choices, RowMaker, Spans
from megatron_run_engine.data import TokenizedSource

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from megatron_run.contracts.schema import Config


class NluOptions(BaseModel):
    """The keys of section ``data`` when it uses nlu."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    task: TaskName = Field("mnli", description="mnli, qqp, squad1, squad2 or race")
    folder: Annotated[str | None, OF_FILES] = Field(
        None, description="folder of the task's files as they are published; needed"
    )
    tokenizer: Annotated[str, OF_FILES] = Field(
        "vocab.txt", description="file or folder of a tokenizer that lays out pairs of texts"
    )
    stride: int = Field(128, ge=1, description="tokens from window to window of a long context of squad")


#: Rows of a sample of race, one a choice.
CHOICES = 4


class Nlu(TokenizedSource):
    """Questions from files. A split is read when it is first opened, and then kept."""

    def __init__(self, options: NluOptions) -> None:
        super().__init__(options.tokenizer)
        self._options, self._opened = options, dict[tuple[Split, int], Choices | Spans]()

    @property
    def fields(self) -> tuple[BatchField, ...]:
        """Which text a token is of, and where padding begins."""
        return (TOKENS, LABELS, LOSS_MASK, BatchField("token_types"), BatchField("documents", shape=(None,)))

    def dataset(self, split: Split, sequence_length: int, seed: int) -> Choices | Spans:
        """Open ``split`` in the order of its files; the published tests without answers are not read.

        Raises :class:`DataError` for files that are missing or not of this task.
        """
        if (split, sequence_length) not in self._opened:
            self._opened[split, sequence_length] = self._read(split, sequence_length)
        return self._opened[split, sequence_length]

    def _read(self, split: Split, length: int) -> Choices | Spans:
        task, folder = self._options.task, Path(str(self._options.folder)).expanduser()
        rows = CHOICES if task == "race" else 1
        if length % rows:
            raise InputError(f"train.sequence_length={length} does not divide into {rows} rows", fix="multiply it by 4")
        maker = RowMaker(self.tokenizer, length // rows)
        paths = files_of(task, split, folder)
        if task in ("squad1", "squad2"):
            questions = [each for path in paths for each in read_questions(path)]
            return Spans(questions, maker, self._options.stride)
        return Choices([each for path in paths for each in read_choices(task, path)], maker)

    def judge(self, split: Split, sequence_length: int, seed: int) -> Judge | None:
        """Accuracy, of QQP F1 too; of SQuAD exact match and F1."""
        opened = self.dataset(split, sequence_length, seed)
        if not len(opened):
            return None

        def judge(logits: NDArray[np.float32]) -> Mapping[str, float]:
            if isinstance(opened, Spans):
                right = {each.name: [text for text, _ in each.answers] for each in opened.questions}
                may_lack = self._options.task == "squad2"
                return squad(answers_of(opened, logits, may_lack=may_lack), right, may_lack=may_lack)
            found = logits[:, 0].argmax(-1)
            answers = np.array([question.answer for question in opened.questions])
            metrics = accuracy(found, answers, [question.group for question in opened.questions])
            return {**metrics, "f1": binary_f1(found, answers)} if self._options.task == "qqp" else metrics

        return judge

    def recipe(self, model: Mapping[str, Any], sequence_length: int) -> Recipe:
        """Table 6's, with a head for the task and as many tokens a row as the saved model of kind bert reads."""
        task = self._options.task
        if model.get("use") != "bert":
            raise InputError(f"data.task={task} trains model=bert", why=f"the model is {model.get('use')}")
        longest = model.get("max_positions") or sequence_length // (model.get("choices") or 1)
        name, found = published(task, model["num_layers"], model["hidden_size"])
        samples = len(self.dataset("train", found.rows * min(found.row, longest), 0))
        summary = f"{task} by the recipe of the {name} model: {found.epochs} epochs"
        return Recipe(summary, {**found.model, "max_positions": longest}, found.train(samples, longest))

    @property
    def files(self) -> tuple[Path, ...]:
        """The files of the training split."""
        return tuple(files_of(self._options.task, "train", Path(str(self._options.folder)).expanduser()))


def check_config(config: Config, options: NluOptions) -> Iterator[str]:
    """Yield nothing. Raises :class:`InputError` unless the model has a head that answers as the task asks."""
    wanted = {"race": "choice", "squad1": "span", "squad2": "span"}.get(options.task, "classification")
    head = config.model.options.get("head")
    if head != wanted:
        raise InputError(
            f"data.task={options.task} is answered by head={wanted}",
            why=f"model={config.model.use} has {'no option head' if head is None else f'head={head}'}",
            fix=f"set model.use=bert and model.head={wanted}, or run megatron-run finetune --task {options.task}",
        )
    yield from ()


@hookimpl
def megatron_run_plugin_info() -> PluginInfo:
    """Plugin nlu of kind data."""
    return PluginInfo("data", "nlu", options=NluOptions, check_config=check_config)


@hookimpl
def megatron_run_create_data(options: NluOptions) -> DataSource:
    """Make the source. No file is read yet."""
    if options.folder is None:
        raise DataError(
            "data=nlu has no questions of its own", origin="data.folder", fix="add --set data.folder=FOLDER"
        )
    return Nlu(options)
