"""Default plugins."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megatron_run.config.merge import ConfigSource
from megatron_run.config.origin import DEFAULT, Choice, Key, Origin, dotted

#: The default of each kind. Data has none: training on data that nobody named would be a silent mistake.
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
        """The condition as the user would type it."""
        return dotted(self.key) + (f"={self.value}" if self.value else "")

    def holds(self, source: ConfigSource) -> bool:
        """Whether the merged ``source`` meets the condition."""
        given = source.values.get(self.key)
        return given is not None and self.value in (None, given.data)


#: Conditional defaults of a kind; the first rule that holds wins.
RULES: Mapping[str, tuple[Rule, ...]] = {
    "scaler": (
        Rule("constant", ("scaler", "loss_scale")),
        Rule("dynamic", ("train", "precision"), "fp16"),  # its gradients vanish without a loss scale
    ),
}


def default_source() -> ConfigSource:
    """The weakest source: the default plugins."""
    source = ConfigSource()
    for kind, words in DEFAULT_PLUGINS.items():
        source.choose(kind, words, DEFAULT)
    return source


def follow_rules(source: ConfigSource) -> None:
    """Apply the rules to kinds of which the user chose no plugin; changes the merged ``source`` in place."""
    for kind, rules in RULES.items():
        rule = next((rule for rule in rules if rule.holds(source)), None)
        if rule and all(choice.origin == DEFAULT for choice in source.choices.get(kind, ())):
            source.choices[kind] = (Choice(rule.word, Origin("default", f"the default with {rule}")),)
