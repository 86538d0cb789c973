"""How the Megatron-LM paper fine-tunes its models: table 6, with the rest as in RoBERTa, which the paper follows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_run_data_nlu.questions import TaskName

#: Layers and width of the models of table 4, by their names in table 6.
SIZES: Mapping[str, tuple[int, int]] = MappingProxyType({"336M": (24, 1024), "1.3B": (24, 2048), "3.9B": (48, 2560)})


@dataclass(frozen=True)
class Published:
    """A row of table 6, and what its task asks of a model. ``row`` is the length of a row of tokens."""

    batch: int
    lr: float
    epochs: int
    model: Mapping[str, Any]
    row: int

    @property
    def rows(self) -> int:
        """Rows of a sample."""
        return int(self.model.get("choices", 1))

    def train(self, samples: int, longest: int) -> dict[str, Any]:
        """The section ``train`` for ``samples`` of training and a model that reads ``longest`` tokens.

        The rate warms up over 6% of the training and falls to 0, weights decay by 0.1 (Liu et al. 2019, table 10).
        """
        return {
            "samples": max(1, samples * self.epochs // self.batch) * self.batch,
            "global_batch_size": self.batch,
            "micro_batch_size": 4 // self.rows if self.rows < 4 else 1,
            "sequence_length": self.rows * min(self.row, longest),
            "lr": self.lr,
            "lr_shape": "linear",
            "lr_warmup": "6%",
            "weight_decay": 0.1,
        }


_CLASSES: Mapping[str, Any] = MappingProxyType({"head": "classification", "choices": 1})
_SPAN: Mapping[str, Any] = MappingProxyType({"head": "span", "choices": 1})
_CHOICE: Mapping[str, Any] = MappingProxyType({"head": "choice", "choices": 4})
#: By task: epochs, what the model is, the length of a row; and by model batch and learning rate.
_TABLE: Mapping[str, tuple[int, Mapping[str, Any], int, Mapping[str, tuple[int, float]]]] = MappingProxyType(
    {
        "mnli": (10, {**_CLASSES, "classes": 3}, 128, {"336M": (128, 1e-5), "1.3B": (128, 1e-5), "3.9B": (128, 1e-5)}),
        "qqp": (12, {**_CLASSES, "classes": 2}, 128, {"336M": (128, 5e-5), "1.3B": (128, 3e-5), "3.9B": (256, 4e-5)}),
        "squad1": (2, _SPAN, 384, {"336M": (64, 3e-5), "1.3B": (48, 3e-5), "3.9B": (48, 1e-5)}),
        "squad2": (2, _SPAN, 384, {"336M": (48, 3e-5), "1.3B": (64, 3e-5), "3.9B": (48, 1e-5)}),
        "race": (3, _CHOICE, 512, {"336M": (32, 2e-5), "1.3B": (16, 1e-5), "3.9B": (32, 2e-5)}),
    }
)


def published(task: TaskName, layers: int, hidden: int) -> tuple[str, Published]:
    """The published numbers of the model of table 4 with these sizes, and its name; of another model that of 336M."""
    name = next((name for name, sizes in SIZES.items() if sizes == (layers, hidden)), "336M")
    epochs, model, row, models = _TABLE[task]
    batch, lr = models[name]
    return name, Published(batch, lr, epochs, model, row)
