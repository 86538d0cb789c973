"""From the text of a launch script to a configuration and what the user must know about it. Nothing is executed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

from megatron_run.config.yaml import flow
from megatron_run.errors import InputError, did_you_mean
from megatron_run_format_megatron import run_keys
from megatron_run_format_megatron.flags import FLAGS, Flag, Verdict, find
from megatron_run_format_megatron.launch_script import Script, is_known, read_script
from megatron_run_format_megatron.network import (
    Setting,
    default_of,
    expert_faults,
    experts,
    given_or_default,
    network,
    network_faults,
)

_TOLD = (Verdict.DIFFERS, Verdict.ABSENT, Verdict.SAME)
_WIDTH = 40  # columns before a comment
#: Flags of launchers whose values multiply to the number of ranks.
_RANKS = ("nproc-per-node", "nnodes")


class Note(NamedTuple):
    """A remark on a flag: the flag as written, and what becomes of it."""

    flag: str
    text: str


@dataclass
class Translation:
    """The configuration that a script asks for, and remarks on what no key can express.

    ``notes`` are by verdict; ``open`` are flags whose value only a shell knows, ``unknown`` those that are not in the
    table, ``problems`` what was found about the script as a whole.
    """

    settings: list[Setting] = field(default_factory=list)
    notes: dict[Verdict, list[Note]] = field(default_factory=lambda: {verdict: [] for verdict in Verdict})
    open: list[Note] = field(default_factory=list)
    unknown: list[Note] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def sections(self) -> dict[str, Any]:
        """The settings as nested mappings, in their order."""
        found: dict[str, Any] = {"version": 1}
        for setting in self.settings:
            *outer, last = setting.key.split(".")
            inner = found
            for part in outer:
                inner = inner.setdefault(part, {})
            inner[last] = setting.value
        return found

    @property
    def warnings(self) -> list[str]:
        """One line for each way in which the run will differ from the script's."""
        told = [f"{note.flag}: {note.text}" for note in self.notes[Verdict.DIFFERS]]
        told += [f"{note.flag}: {note.text}" for note in (*self.open, *self.unknown)]
        return told + self.problems


def translate(text: str, name: str) -> Translation:
    """Read the launch script ``text`` of the file ``name``.

    Raises :class:`InputError` for a script that starts no training, and for a flag with an unreadable value.
    """
    script = read_script(text, name)
    found = Translation()
    arguments = _arguments(script, name, found)
    for line in script.branches:
        found.problems.append(f"line {line} decides something: every assignment was read, in order")
    found.notes[Verdict.DIFFERS] += [Note(*fault.split(": ", 1)) for fault in network_faults(arguments)]
    found.notes[Verdict.DIFFERS] += [Note(*fault) for fault in expert_faults(arguments)]
    for verdict, note in _conflicts(arguments):
        found.notes[verdict].append(note)
    micro = arguments.get("micro_batch_size", 1)
    parts = (
        network(arguments),
        experts(arguments),
        [given_or_default(arguments, "model.dropout", "--hidden-dropout", 0.1)],
        run_keys.train(arguments, micro * _data_parallel(script, arguments)),
        run_keys.parallel(arguments),
        run_keys.scaler(arguments),
        run_keys.optimizer(arguments),
        run_keys.data(arguments),
        run_keys.run(arguments),
    )
    found.settings = _once(chain.from_iterable(parts))
    return found


def read_flags(words: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Each flag with its values: ``--a 1 2 --b=3`` is ``("--a", ["1", "2"])``, ``("--b", ["3"])``."""
    name, values = "", list[str]()
    for word in words:
        if word.startswith("--"):
            if name:
                yield name, values
            name, equals, value = word.partition("=")
            values = [value] if equals else []
        else:
            values.append(word)
    if name:
        yield name, values


def _arguments(script: Script, name: str, found: Translation) -> dict[str, Any]:
    """The flags' values by Megatron's names. Flags without a key are noted; the last of repeated ones counts."""
    arguments, given = dict[str, Any](), dict(read_flags(script.arguments))
    if "--load" in given and given["--load"] == given.get("--save"):
        note = Note(" ".join(["--load", *given.pop("--load")]), "a run resumes from its own folder")
        found.notes[Verdict.SAME].append(note)
    for word, values in given.items():
        flag, written = find(word), " ".join([word, *values])
        if flag is None:
            meant = did_you_mean(word, [known.name for known in FLAGS if "*" not in known.name])
            found.unknown.append(Note(written, f"this flag is not known; {meant}".rstrip("; ")))
        elif flag.verdict is Verdict.TAKEN and not all(map(is_known, values)):
            found.open.append(Note(written, f"only a shell knows the value: set {flag.text}"))
        elif flag.verdict is Verdict.TAKEN:
            arguments[flag.stored] = _read(flag, written, values, name)
        elif flag.network:
            arguments[flag.stored] = " ".join(values) or True
        else:
            same = flag.verdict is not Verdict.SAME and values and not flag.differs(values)
            found.notes[Verdict.SAME if same else flag.verdict].append(Note(written, flag.text))
    return arguments


def _read(flag: Flag, written: str, values: list[str], name: str) -> Any:
    try:
        return flag.read(values)
    except ValueError as error:
        raise InputError(f"{written} cannot be read", why=str(error), origin=name) from None


def _conflicts(arguments: dict[str, Any]) -> Iterator[tuple[Verdict, Note]]:
    """Flags that become keys, with values, alone or together, that the keys cannot express."""
    hidden, attention = arguments.get("hidden_dropout", 0.1), arguments.get("attention_dropout", 0.1)
    if hidden != attention:
        flag = "--attention-dropout"
        written = f"{flag} {attention}" if "attention_dropout" in arguments else f"{default_of(flag)}, {attention}"
        yield Verdict.DIFFERS, Note(written, f"one dropout serves all: model.dropout is {hidden}")
    each = arguments.get("num_layers_per_virtual_pipeline_stage")
    if each and run_keys.count_chunks(arguments) == 1:
        (_, stages), layers = run_keys.sizes(arguments), arguments.get("num_layers")
        text = f"{layers} layers on {stages} stages are no chunks of {each}: there is one chunk a stage"
        yield Verdict.ABSENT, Note(f"--num-layers-per-virtual-pipeline-stage {each}", text)
    unknown = [name for name in run_keys.recomputed_modules(arguments) if name not in run_keys.RECOMPUTED]
    if unknown:
        text = "no segment of that name: train.recompute takes attn, core_attn, mlp and the segments of experts"
        yield Verdict.ABSENT, Note(f"--recompute-modules {' '.join(unknown)}", text)
    if arguments.get("data_path"):
        words = " ".join(arguments["data_path"])
        text = "indexed datasets are not read yet: the data is mock, to measure with"
        yield Verdict.DIFFERS, Note(f"--data-path {words}", text)


def _data_parallel(script: Script, arguments: dict[str, Any]) -> int:
    """The data-parallel size of the launcher's ranks; 1 where the launcher does not tell."""
    given = {name.lstrip("-").replace("_", "-"): values for name, values in read_flags(script.launcher)}
    counts = [given.get(name, ["1"])[:1] for name in _RANKS]
    world = 1
    for count in chain.from_iterable(counts):
        world *= int(count) if count.isdecimal() else 1
    tensor, pipeline = run_keys.sizes(arguments)
    return max(1, world // (tensor * pipeline))


def _once(settings: Iterable[Setting]) -> list[Setting]:
    """Each key once; its first setting counts."""
    found: dict[str, Setting] = {}
    for setting in settings:
        found.setdefault(setting.key, setting)
    return list(found.values())


def yaml(translation: Translation, name: str) -> str:
    """A configuration file that resolves, made from the script ``name``."""
    reasons = {setting.key: setting.why for setting in translation.settings}
    lines = [f"# Made from {name} by `megatron-run config from-megatron`."]
    lines += _lines(translation.sections, "", reasons)
    notes = [(verdict.value, translation.notes[verdict]) for verdict in _TOLD]
    notes[1:1] = [("is for you to fill in", translation.open), ("is not known", translation.unknown)]
    for heading, each in notes:
        lines += _comment(f"What {heading}:", each)
    lines += _comment("About the script:", [Note(problem, "") for problem in translation.problems])
    return "".join(f"{line}\n" for line in lines)


def _lines(data: Mapping[str, Any], prefix: str, reasons: Mapping[str, str]) -> Iterator[str]:
    indent = "  " * prefix.count(".")
    for name, value in data.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping):
            yield f"{indent}{name}:"
            yield from _lines(value, f"{key}.", reasons)
        else:
            line = f"{indent}{name}: {flow(value)}"
            yield f"{line:{_WIDTH}}  # {reasons[key]}" if key in reasons else line


def _comment(heading: str, notes: Iterable[Note]) -> list[str]:
    """A heading and one line a note, as comments; nothing without a note."""
    told = [f"#   {note.flag}: {note.text}" if note.text else f"#   {note.flag}" for note in notes]
    return ["#", f"# {heading}", *(line.replace("\n", " ") for line in told)] if told else []
