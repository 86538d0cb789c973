"""What conformance suites are run on, and what they find."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from megatron_run.config.values import nested
from megatron_run.registry.discover import scan
from megatron_run.registry.load import load
from megatron_run.registry.loaded_plugin import Plugin
from megatron_run_testing import Check, CheckFailed
from tests.support.decoders import DECODERS
from tests.support.installed import read_once

Options = Mapping[str, object]

#: What must be said of a kind, as the network in which a model is tried, or of one plugin; else defaults are tried.
SMALL: Mapping[str, Options] = {
    "model": {"num_layers": 4, "hidden_size": 16, "num_heads": 4, "vocab_size": 61},
    "model=t5": {"encoder_length": 24, "head_size": 8},
    "model=deepseek": {"kv_rank": 8, "rope_head_size": 2, "nope_head_size": 4, "value_head_size": 4},
    "data=span-corruption": {"encoder_length": 64},
    "scaler=constant": {"loss_scale": 1024},
}
#: Options that make another plugin of one, tried besides its defaults.
VARIANTS: Mapping[str, Mapping[str, Options]] = {
    "model=gpt": {
        "llama": {"position": "rope", "norm.kind": "rmsnorm", "activation": "swiglu", "num_kv_heads": 2, "bias": False},
        "untied, three layers": {"tie_embeddings": False, "num_layers": 3},
        "a balanced mixture": {
            "experts.count": 4,
            "experts.router.groups": 2,
            "experts.router.bias_rate": 1e-3,
            "experts.layer_first": 1,
        },
        **DECODERS,
    },
    "model=bert": {"norms after sums": {"norm.order": "post"}},
    "model=t5": {"first, one encoder layer": {"activation": "relu", "tie_embeddings": False, "encoder_layers": 1}},
    "optimizer=adamw": {"updating on the host": {"state_on_host": True}},
    "optimizer=zero1": {
        "of whole matrices": {"rule": "muon"},
        "updating matrices on the host": {"rule": "muon", "state_on_host": True},
    },
    "optimizer=zero3": {
        "updating on the host": {"whole_below": 0, "state_on_host": True, "grad_dtype": "param"},
        "with all lent": {"whole_below": 0},
        "reducing once a step": {"whole_below": 0, "reduce": "step", "segments_held": 0},
    },
    "parallel-layer=tensor": {"without overlap": {"overlap": False}},
    "scaler=dynamic": {"short window": {"loss_scale_window": 7, "initial_loss_scale": 2.0**16, "hysteresis": 1}},
}


@cache
def installed_plugins() -> tuple[tuple[str, Plugin], ...]:
    """Every installed plugin of every kind with its options, under the name to show."""
    with read_once():
        return tuple(_installed_plugins())


def _installed_plugins() -> Iterator[tuple[str, Plugin]]:
    for entry in scan().entries:
        plugin, base = load(entry, "the conformance suite"), {**SMALL.get(entry.kind, {}), **SMALL.get(str(entry), {})}
        if str(plugin) == "data=indexed":
            base = {"paths": str(_small_dataset()), "vocab_size": 61, "split": "8,1,1"}
        if str(plugin) in ("data=sentence-pairs", "data=span-corruption"):
            base |= {"paths": str(_small_dataset()), "split": "8,1,1"}
        if str(plugin) == "data=nlu":
            base = {"task": "race", **_small_task()}
        for name, variant in {"": {}, **VARIANTS.get(str(plugin), {})}.items():
            options = plugin.options_model.model_validate(nested({**base, **variant}))
            yield f"{plugin}{name and ' as ' + name}", plugin.with_options(options)


@cache
def _small_dataset() -> Path:
    """A dataset for data=indexed, which has none of its own. It is gone when the process ends."""
    from tests.plugins.data.indexed.corpora import corpus

    _FOLDERS.append(TemporaryDirectory())
    return Path(corpus(Path(_FOLDERS[-1].name) / "small", seed=1, documents=100, longest=61, vocabulary=61))


@cache
def _small_task() -> Options:
    """The files of a task and a vocabulary for data=nlu."""
    from tests.plugins.data.nlu import published

    _FOLDERS.append(TemporaryDirectory())
    folder = Path(_FOLDERS[-1].name)
    return {"folder": str(published.race(folder)), "tokenizer": str(published.vocabulary(folder / "vocab.txt"))}


_FOLDERS: list[TemporaryDirectory[str]] = []


def failures(checks: Iterable[Check]) -> dict[str, str]:
    """Run every check; what the failing ones say, by name."""
    found = {}
    for check in checks:
        try:
            check.run()
        except CheckFailed as failure:
            found[check.name] = str(failure)
    return found
