"""The suite of kind format notices a format that breaks the contract."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_run.contracts import (
    Adapters,
    AdapterWeights,
    Fetched,
    ForeignAdapters,
    Format,
    TranslatedScript,
    Wanted,
    Weights,
)
from megatron_run.errors import CheckpointError, InputError
from megatron_run_testing.format import format_checks
from tests.contracts.conformance import failures

BOTH, ONLY = frozenset({"import", "export"}), frozenset({"adapters"})
RECOGNISES, IMPLEMENTS = "it recognises nothing in a folder of others", "it provides what it implements"
OWN, UNTOUCHED = "what it writes it recognises", "writing changes no tensor"
UNKNOWN, OTHERS = "a model that it cannot hold is refused", "a folder of others is refused with a reason"
BACK, DAMAGE = "a model comes back as it was written", "a file that is cut short is refused, or not needed"
SCRIPTS = "a file that is no launch script is refused with a reason"
NAMES = "a name that leads elsewhere is refused with a reason"


class Text(Format):
    """A model as one JSON file. It conforms; the broken ones below change one thing each."""

    files = "model.txt"

    def recognises(self, source: Path) -> bool:
        return (source / "model.txt").is_file()

    def read(self, source: Path) -> Weights:
        try:
            about = json.loads((source / "model.txt").read_text())
        except (OSError, ValueError) as error:
            raise CheckpointError("no", why=str(error)) from error
        tensors = {name: partial(torch.tensor, values) for name, values in about["tensors"].items()}
        return Weights(about["model"], tensors, sequence_length=about["length"])

    def write(self, weights: Weights, folder: Path) -> None:
        values = {name: read().tolist() for name, read in weights.tensors.items()}
        about = {"model": dict(weights.config), "length": weights.sequence_length, "tensors": values}
        (folder / "model.txt").write_text(json.dumps(about))


class Anything(Text):
    def recognises(self, source: Path) -> bool:
        return source.is_dir()


class Shy(Text):
    def recognises(self, source: Path) -> bool:
        return False


class Wordless(Text):
    files = ""


class Careless(Text):
    def read(self, source: Path) -> Weights:
        about = json.loads((source / "model.txt").read_text())
        return Weights(about["model"], {}, sequence_length=about["length"])


class Cleaning(Text):
    def write(self, weights: Weights, folder: Path) -> None:
        super().write(weights, folder)
        next(iter(weights.tensors.values()))().zero_()


def changed(weights: Weights, change: Callable[[Tensor], Tensor]) -> Weights:
    """The same model, whose readers change what they read."""
    tensors = {name: partial(change, read()) for name, read in weights.tensors.items()}
    return replace(weights, tensors=tensors)


class HalfPrecision(Text):
    def read(self, source: Path) -> Weights:
        return changed(super().read(source), torch.Tensor.half)


class Rounding(Text):
    def write(self, weights: Weights, folder: Path) -> None:
        super().write(changed(weights, lambda tensor: tensor.bfloat16().float()), folder)


class Forgetful(Text):
    """Keeps neither what the model is, nor how long its sequences are, nor its last tensor."""

    def __init__(self, **changes: Any) -> None:
        self._changes = changes

    def read(self, source: Path) -> Weights:
        found = super().read(source)
        config = {**found.config, **self._changes.get("config", {})}
        tensors = dict(list(found.tensors.items())[: self._changes.get("last")])
        length = self._changes.get("length", found.sequence_length)
        step = self._changes.get("step", found.step)
        return Weights(config, tensors, step, length, moments=self._changes.get("moments", {}))


class Trusting(Text):
    """Takes whatever bytes a cut file has for zeros."""

    def read(self, source: Path) -> Weights:
        found = source / "model.txt"
        if found.is_file() and not found.read_text().endswith("}}"):
            return Weights({}, {})
        return super().read(source)


class Unwilling(Text):
    def write(self, weights: Weights, folder: Path) -> None:
        raise InputError("never")


class Scripts(Format):
    files = "train.sh"

    def __init__(self, answer: Exception | TranslatedScript) -> None:
        self._answer = answer

    def recognises(self, source: Path) -> bool:
        return False

    def translate_script(self, script: Path) -> TranslatedScript:
        if isinstance(self._answer, Exception):
            raise self._answer
        return self._answer


class Additions(Format):
    """Adapters alone."""

    files = "adapters.txt"

    def __init__(self, answer: Exception | ForeignAdapters) -> None:
        self._answer = answer

    def recognises(self, source: Path) -> bool:
        return False

    def read_adapters(self, source: Path) -> ForeignAdapters:
        if isinstance(self._answer, Exception):
            raise self._answer
        return self._answer


class Fetching(Text):
    """Takes names of another place."""

    def __init__(self, scheme: str, refusal: Exception | None) -> None:
        self.scheme, self._refusal = scheme, refusal

    def fetch(self, name: str, wanted: Wanted, tell: Callable[[str], None], before: Path | None = None) -> Fetched:
        if self._refusal is not None:
            raise self._refusal
        return Fetched(Path("/"), name)


class Either(Additions, Text):
    recognises = Text.recognises


def broken(made: Format, provides: Iterable[str] = BOTH) -> dict[str, str]:
    return failures(format_checks(made, frozenset(provides)))


def fault(made: Format, check: str, provides: Iterable[str] = BOTH) -> str:
    """What ``check`` alone says."""
    found = failures(each for each in format_checks(made, frozenset(provides)) if each.name == check)
    return found.get(check, "nothing was found")


def test_a_format_that_conforms_passes() -> None:
    assert broken(Text()) == {}
    assert broken(Scripts(InputError("this is no script")), {"launch-script"}) == {}
    assert broken(Additions(CheckpointError("there are none")), {"adapters"}) == {}
    assert len(format_checks(Text(), BOTH)) == 8


@pytest.mark.parametrize(
    ("made", "check", "said"),
    [
        (Anything(), RECOGNISES, "recognises gives True for an empty folder"),
        (Shy(), OWN, "gpt2: recognises does not give True for what write wrote: model.txt"),
        (Wordless(), IMPLEMENTS, "files is ''"),
        (Careless(), OTHERS, "reading a path where nothing is raised FileNotFoundError"),
        (Cleaning(), UNTOUCHED, "gpt2: write changed embedding.word.weight"),
        (HalfPrecision(), BACK, "comes back as other torch.float16 values"),
        (Rounding(), BACK, "comes back as other torch.float32 values"),
        (Forgetful(last=-1), BACK, "gpt2: tensors come back changed: it lacks"),
        (Forgetful(config={"norm": {"eps": 1e-3}}), BACK, "gpt2: config comes back with norm.eps=0.001, it was 1e-05"),
        (Forgetful(length=None), BACK, "gpt2: sequence_length comes back as None, it was 16"),
        (Forgetful(step=8), BACK, "gpt2: step comes back as 8, it was 7"),
        (Forgetful(moments={"exp_avg": {"x": partial(torch.zeros, 2)}}), BACK, "exp_avg of tensors come back changed"),
        (Forgetful(config={"colour": "blue"}), UNKNOWN, "the section model of another model comes back as"),
        (Trusting(), DAMAGE, "gpt2: reading with half of model.txt: tensors come back changed: it lacks"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Format) else None,
)
def test_a_breach_is_found(made: Format, check: str, said: str) -> None:
    assert said in fault(made, check)


def test_what_is_provided_is_what_is_implemented() -> None:
    assert "provides 'launch-script' and does not implement" in fault(Text(), IMPLEMENTS, {*BOTH, "launch-script"})
    assert "implements write and does not provide 'export'" in fault(Text(), IMPLEMENTS, {"import"})
    assert fault(Text(), IMPLEMENTS, ()).startswith("it provides none of import, export, launch-script")


def test_adapters_are_refused_where_there_are_none_and_read_by_a_format_of_their_own() -> None:
    found = broken(Additions(ForeignAdapters("", lambda _: AdapterWeights(Adapters("", "a", "b", 1, 1.0), {}))), ONLY)
    assert "gave ForeignAdapters" in found["a folder without adapters is refused with a reason"]
    said = fault(Either(CheckpointError("no")), IMPLEMENTS, {*BOTH, *ONLY})
    assert "provides 'import' and 'adapters'" in said


def test_names_have_a_scheme_and_are_refused_by_their_form() -> None:
    fetches, refusal = {*BOTH, "fetch"}, InputError("no name")
    assert broken(Fetching("there", refusal), fetches) == {}
    assert "scheme is ''" in fault(Fetching("", refusal), IMPLEMENTS, fetches)
    assert "scheme is 'there:'" in fault(Fetching("there:", refusal), IMPLEMENTS, fetches)
    assert "gave Fetched" in fault(Fetching("there", None), NAMES, fetches)


@pytest.mark.parametrize(
    ("answer", "said"), [(TranslatedScript("", ()), "gave TranslatedScript"), (KeyError("x"), "raised KeyError")]
)
def test_what_is_no_script_must_be_refused(answer: Exception | TranslatedScript, said: str) -> None:
    assert said in broken(Scripts(answer), {"launch-script"})[SCRIPTS]


def test_a_format_that_holds_no_gpt_passes_and_says_so() -> None:
    assert broken(Unwilling()) == {}
    said = {check.name: check.run() for check in format_checks(Unwilling(), BOTH)}
    assert said[BACK] == "it refuses every model gpt: never"
