"""The conformance suite of kind ``format``."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType

import torch
from torch import Tensor

from megatron_run.config.fields import computes_the_same, walk
from megatron_run.config.values import nested
from megatron_run.contracts.format import (
    ADAPTERS,
    EXPORT,
    FETCH,
    FORMAT_ABILITIES,
    IMPORT,
    LAUNCH_SCRIPT,
    Format,
    ReadTensor,
    Weights,
)
from megatron_run.errors import RunError
from megatron_run_engine.formats import GptOptions, Shape, gpt_options, logical_shapes, shapes_fault
from megatron_run_testing import Check, CheckFailed

#: Of the models that are tried: the longest sequence, and the updates so far.
LENGTH, STEP = 16, 7
_SMALL = {"num_layers": 2, "hidden_size": 24, "num_heads": 6, "ffn_size": 40, "vocab_size": 61}
_ROTATED = {**_SMALL, "position": "rope", "norm.kind": "rmsnorm", "activation": "swiglu", "bias": False}
#: Models that are written and read again, their options by dotted name. A format may refuse any of them. Sizes differ,
#: so that no axis is another's.
MODELS: Mapping[str, Mapping[str, object]] = MappingProxyType(
    {
        "gpt2": _SMALL,
        "gpt2, untied": {**_SMALL, "tie_embeddings": False, "activation": "gelu_tanh", "norm.eps": 3e-4},
        "llama": {**_ROTATED, "num_kv_heads": 2, "tie_embeddings": False, "rope.theta": 500.0},
        "llama, tied, with biases": {**_ROTATED, "bias": True},
        "experts.count": {**_SMALL, "experts.count": 4},
    }
)


#: The method of each ability.
_METHODS = ("read", "write", "translate_script", "read_adapters", "fetch", "publisher")


def format_checks(made: Format, provides: Collection[str]) -> tuple[Check, ...]:
    """The checks of a format; ``provides`` is that of its ``PluginInfo``, whose abilities decide what is tried."""
    checks: dict[str, Callable[[], str | None]] = {
        "it provides what it implements": partial(_implements, made, provides),
        "it recognises nothing in a folder of others": partial(_recognises_nothing, made),
    }
    both = {IMPORT, EXPORT} <= set(provides)
    if EXPORT in provides:
        checks |= {
            "what it writes it recognises": partial(_each_model, made, _recognises_its_own),
            "writing changes no tensor": partial(_each_model, made, _leaves_tensors),
            "a model that it cannot hold is refused": partial(_unknown_model, made, both=both),
        }
    if IMPORT in provides:
        checks["a folder of others is refused with a reason"] = partial(_refuses_others, made.read)
    if ADAPTERS in provides:
        checks["a folder without adapters is refused with a reason"] = partial(_refuses_others, made.read_adapters)
    if both:
        checks |= {
            "a model comes back as it was written": partial(_each_model, made, _comes_back),
            "a file that is cut short is refused, or not needed": partial(_each_model, made, _refuses_damage),
        }
    if FETCH in provides:
        checks["a name that leads elsewhere is refused with a reason"] = partial(_refuses_names, made)
    if LAUNCH_SCRIPT in provides:
        checks["a file that is no launch script is refused with a reason"] = partial(_refuses_scripts, made)
    return tuple(Check(name, run) for name, run in checks.items())


@cache
def _shapes(model: str) -> Mapping[str, Shape]:
    """Every logical tensor of ``model`` with its shape: to build it takes longer than to draw its values."""
    return logical_shapes(gpt_options(Weights(nested(MODELS[model]), {})), LENGTH)


def _random_weights(model: str) -> Weights:
    """One of ``MODELS`` with random values, one moment and a counter, as a saved step of a run holds them."""
    generator = torch.Generator().manual_seed(1)
    values = {name: torch.randn(shape, generator=generator) for name, shape in _shapes(model).items()}
    tensors = {name: partial(_same, value) for name, value in values.items()}
    moments = {name: partial(_same, value.abs()) for name, value in values.items()}
    steps = {name: partial(_same, torch.tensor(float(STEP))) for name in values}
    return Weights(nested(MODELS[model]), tensors, STEP, LENGTH, moments={"exp_avg_sq": moments, "step": steps})


def _same(value: Tensor) -> Tensor:
    return value


@dataclass(frozen=True)
class _Written:
    """A model that was written into ``folder``, and ``values``, copies of its tensors made before."""

    weights: Weights
    values: Mapping[str, Tensor]
    folder: Path


def _implements(made: Format, provides: Collection[str]) -> None:
    abilities = [ability for ability in FORMAT_ABILITIES if ability in provides]
    if not abilities:
        raise CheckFailed(f"it provides none of {', '.join(FORMAT_ABILITIES)}, so that nothing can be done with it")
    methods = dict(zip(FORMAT_ABILITIES, _METHODS, strict=True))
    for ability, method in methods.items():
        written = getattr(type(made), method) is not getattr(Format, method)
        if written != (ability in provides):
            raise CheckFailed(
                f"it implements {method} and does not provide {ability!r}"
                if written
                else f"it provides {ability!r} and does not implement {method}"
            )
    if {IMPORT, ADAPTERS} <= set(provides):
        raise CheckFailed(f"it provides {IMPORT!r} and {ADAPTERS!r}: what it recognises is a model, or adapters of one")
    if not isinstance(made.files, str) or not made.files or "\n" in made.files:
        raise CheckFailed(f"files is {made.files!r}, expected a line that says what lies in such a folder")
    if bool(made.scheme) != (FETCH in provides) or not re.fullmatch("[a-z0-9]*", made.scheme):
        raise CheckFailed(f"scheme is {made.scheme!r}, expected a word where it provides {FETCH!r}, as hf of hf:NAME")
    if not isinstance(made.executes, str):
        raise CheckFailed(f"executes is {made.executes!r}, expected a text, empty where reading executes nothing")


def _others(folder: Path) -> Iterator[tuple[str, Path]]:
    """Sources that are of no format."""
    yield "a path where nothing is", folder / "nowhere"
    (folder / "empty").mkdir()
    yield "an empty folder", folder / "empty"
    (folder / "file").write_bytes(b"\x80\x04 not a model\n" * 9)
    yield "a file", folder / "file"
    (folder / "photos").mkdir()
    (folder / "photos" / "readme.txt").write_text("holidays\n", encoding="utf-8")
    yield "a folder of other files", folder / "photos"


def _recognises_nothing(made: Format) -> None:
    with TemporaryDirectory() as folder:
        for what, source in _others(Path(folder)):
            found = made.recognises(source)
            if found is not False:
                raise CheckFailed(f"recognises gives {found!r} for {what}, expected False")


def _refuses_others(read: Callable[[Path], object]) -> None:
    with TemporaryDirectory() as folder:
        for what, source in _others(Path(folder)):
            _refused(partial(read, source), f"reading {what}")


def _refuses_scripts(made: Format) -> None:
    with TemporaryDirectory() as folder:
        for what, source in _others(Path(folder)):
            _refused(partial(made.translate_script, source), f"translating {what}")
        script = Path(folder) / "train.sh"
        script.write_text("echo hello\n", encoding="utf-8")
        _refused(partial(made.translate_script, script), "translating a script that starts no training")


def _refuses_names(made: Format) -> None:
    """Refused by their form: nothing is asked of the network."""
    for name in ("../../etc/passwd", "", "a name", "/etc", "model\n"):
        _refused(partial(made.fetch, name, "model", print), f"fetching {name!r}")


def _refused(attempt: Callable[[], object], what: str) -> None:
    try:
        found = attempt()
    except RunError:
        return
    except (Exception, SystemExit) as error:
        raise CheckFailed(
            f"{what} raised {type(error).__name__}: {error}; raise a CheckpointError or InputError"
        ) from error
    raise CheckFailed(f"{what} gave {type(found).__name__}; raise a CheckpointError or InputError")


def _each_model(made: Format, check: Callable[[Format, _Written], None]) -> str:
    """Run ``check`` on each model that the format can hold. Says so when it refuses all."""
    refusals = []
    for name in MODELS:
        weights = _random_weights(name)
        values = {each: read().clone() for each, read in weights.tensors.items()}
        with TemporaryDirectory() as folder:
            try:
                made.write(weights, Path(folder))
            except RunError as refusal:
                refusals.append(str(refusal))
                continue
            try:
                check(made, _Written(weights, values, Path(folder)))
            except (CheckFailed, RunError) as failure:
                raise CheckFailed(f"{name}: {failure}") from failure
    return f"it refuses every model gpt: {refusals[0]}" if len(refusals) == len(MODELS) else ""


def _recognises_its_own(made: Format, written: _Written) -> None:
    if made.recognises(written.folder) is not True:
        entries = sorted(path.name for path in written.folder.iterdir())
        raise CheckFailed(f"recognises does not give True for what write wrote: {', '.join(entries) or 'nothing'}")


def _leaves_tensors(_: Format, written: _Written) -> None:
    for name, read in written.weights.tensors.items():
        if not torch.equal(read(), written.values[name]):
            raise CheckFailed(f"write changed {name}; what a reader gives may share memory with a file")


def _comes_back(made: Format, written: _Written) -> None:
    found, given = made.read(written.folder), written.weights
    _check_tensors(found.tensors, written.values, "")
    for field, readers in found.moments.items():
        wanted = {name: read() for name, read in given.moments.get(field, {}).items()}
        _check_tensors(readers, wanted, f"{field} of ")
    options, expected = (gpt_options(each).explicit() for each in (found, given))
    kept = [".".join(key) for key, field in walk(GptOptions) if not computes_the_same(field)]
    changed = [key for key in kept if options[key] != expected[key]]
    if changed:
        key = changed[0]
        raise CheckFailed(f"config comes back with {key}={options[key]!r}, it was {expected[key]!r}")
    lengths = (LENGTH,) if options["position"] == "learned" else (LENGTH, None)
    if found.sequence_length not in lengths:
        raise CheckFailed(f"sequence_length comes back as {found.sequence_length}, it was {LENGTH}")
    if found.step not in (STEP, 0):
        raise CheckFailed(f"step comes back as {found.step}, it was {STEP}; 0 where the format has no place for it")


def _check_tensors(found: Mapping[str, ReadTensor], wanted: Mapping[str, Tensor], what: str) -> None:
    values = {name: read() for name, read in found.items()}
    shapes, expected = ({n: tuple(value.shape) for n, value in each.items()} for each in (values, wanted))
    fault = shapes_fault(shapes, expected)
    if fault:
        raise CheckFailed(f"{what}tensors come back changed: {fault}")
    for name, value in values.items():
        if value.dtype != torch.float32 or not torch.equal(value, wanted[name]):
            raise CheckFailed(f"{what}{name} comes back as other {value.dtype} values; it was written in float32")


def _unknown_model(made: Format, *, both: bool) -> None:
    """A model of which only its own plugin knows the tensors: refused, or kept as it is."""
    value = torch.arange(6.0).view(2, 3)
    weights = Weights({"use": "somebody:else", "colour": "red"}, {"a.b": partial(_same, value)}, STEP, LENGTH)
    with TemporaryDirectory() as folder:
        try:
            made.write(weights, Path(folder))
        except RunError:
            return
        if both:
            found = made.read(Path(folder))
            _check_tensors(found.tensors, {"a.b": value}, "")
            if dict(found.config) != dict(weights.config):
                raise CheckFailed(f"the section model of another model comes back as {dict(found.config)}")


def _refuses_damage(made: Format, written: _Written) -> None:
    for path in sorted(path for path in written.folder.rglob("*") if path.is_file()):
        content = path.read_bytes()
        path.write_bytes(content[: len(content) // 2])
        where = f"reading with half of {path.relative_to(written.folder)}"
        try:
            _check_tensors(made.read(written.folder).tensors, written.values, f"{where}: ")
        except RunError:
            continue  # with the content restored
        except CheckFailed:
            raise
        except (Exception, SystemExit) as error:
            raise CheckFailed(f"{where} raised {type(error).__name__}: {error}; raise a CheckpointError") from error
        finally:
            path.write_bytes(content)
