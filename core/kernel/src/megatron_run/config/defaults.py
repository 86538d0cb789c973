"""The plugins that are chosen where nobody chooses one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megatron_run.config.layers import SEPARATORS, Layer
from megatron_run.config.origin import DEFAULT, Choice, Key, Origin, dotted

#: What is chosen where nobody says otherwise. Data is absent: it is never chosen in silence.
DEFAULT_PLUGINS: Mapping[str, tuple[str, ...]] = {
    "scaler": ("none",),
    "optimizer": ("adamw",),
    "schedule": ("sequential",),
    "parallel-layer": ("dense",),
    "graph-capture": ("none",),
    "model": ("gpt",),
    "observer": ("console", "jsonl", "tensorboard"),
}


@dataclass(frozen=True)
class Rule:
    """The default is ``word`` where ``key`` is set: to ``value``, or to anything when that is None."""

    word: str
    key: Key
    value: str | None = None

    def __str__(self) -> str:
        """The condition as one would type it."""
        return dotted(self.key) + (f"={self.value}" if self.value else "")

    def holds(self, layer: Layer) -> bool:
        """Whether ``layer``, with everything that the user said, meets the condition."""
        given = layer.values.get(self.key)
        return given is not None and self.value in (None, given.data)


#: Other defaults of a kind; of the rules that hold the first wins.
RULES: Mapping[str, tuple[Rule, ...]] = {
    "scaler": (
        Rule("constant", ("scaler", "loss_scale")),
        Rule("dynamic", ("train", "precision"), "fp16"),  # its gradients vanish without a loss scale
    ),
}


def default_layer() -> Layer:
    """The weakest layer: the default plugins."""
    layer = Layer()
    for kind, words in DEFAULT_PLUGINS.items():
        layer.choose(kind, words, DEFAULT)
    return layer


def follow_rules(layer: Layer) -> None:
    """Choose by the rules where nobody chose: ``layer`` is all layers as one, and is changed in place."""
    for kind, rules in RULES.items():
        rule = next((rule for rule in rules if rule.holds(layer)), None)
        if rule and all(choice.origin == DEFAULT for choice in layer.choices.get(kind, ())):
            layer.choices[kind] = (Choice(rule.word, Origin("default", f"the default with {rule}")),)


def default_text(kind: str) -> str:
    """The default of ``kind.use`` in words; empty when there is none."""
    words = SEPARATORS.get(kind, "").join(DEFAULT_PLUGINS.get(kind, ()))
    return "; ".join(filter(None, (words, *(f"{rule.word} with {rule}" for rule in RULES.get(kind, ())))))
