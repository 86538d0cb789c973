"""From the text of a launch script to a configuration and to what must be said about it. Nothing is executed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

from megatron_run.config.megatron import layout, training
from megatron_run.config.megatron.experts import expert_faults, experts
from megatron_run.config.megatron.flag import Flag, Verdict
from megatron_run.config.megatron.flags import FLAGS, find
from megatron_run.config.megatron.model import Setting, default_of, given_or_default, network, network_faults
from megatron_run.config.megatron.script import Script, read_script
from megatron_run.config.megatron.words import is_known
from megatron_run.errors import InputError, did_you_mean

#: Flags of launchers whose values multiply to the number of ranks.
_RANKS = ("nproc-per-node", "nnodes")


class Note(NamedTuple):
    """What to say of a flag: as it was written, and what becomes of it."""

    flag: str
    text: str


@dataclass
class Translation:
    """The configuration that a script asks for, and what it asks for that no key says.

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
        """One line for each thing because of which the run will not be what the script asked for."""
        told = [f"{note.flag}: {note.text}" for note in self.notes[Verdict.DIFFERS]]
        told += [f"{note.flag}: {note.text}" for note in (*self.open, *self.unknown)]
        return told + self.problems


def translate(text: str, name: str) -> Translation:
    """Read the launch script ``text`` of the file ``name``.

    Raises :class:`InputError` for a script that starts no training, and for a flag whose value is none.
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
        chain(network(arguments), experts(arguments), _dropout(arguments)),
        training.train(arguments, micro * _data_parallel(script, arguments)),
        layout.parallel(arguments),
        training.scaler(arguments),
        training.optimizer(arguments),
        layout.data(arguments),
        layout.run(arguments),
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
    """The flags' values by Megatron's names. What becomes no key is noted; of a repeated flag the last one counts."""
    arguments, given = dict[str, Any](), dict(read_flags(script.arguments))
    if "--load" in given and given["--load"] == given.get("--save"):
        note = Note(" ".join(["--load", *given.pop("--load")]), "a run goes on in its folder by itself")
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
    """What flags that become keys ask for and keys cannot say: by their values, or two of them together."""
    hidden, attention = arguments.get("hidden_dropout", 0.1), arguments.get("attention_dropout", 0.1)
    if hidden != attention:
        flag = "--attention-dropout"
        written = f"{flag} {attention}" if "attention_dropout" in arguments else f"{default_of(flag)}, {attention}"
        yield Verdict.DIFFERS, Note(written, f"one dropout serves all: model.dropout is {hidden}")
    each = arguments.get("num_layers_per_virtual_pipeline_stage")
    if each and layout.count_chunks(arguments) == 1:
        (_, stages), layers = layout.sizes(arguments), arguments.get("num_layers")
        text = f"{layers} layers on {stages} stages are no chunks of {each}: there is one chunk a stage"
        yield Verdict.ABSENT, Note(f"--num-layers-per-virtual-pipeline-stage {each}", text)
    if arguments.get("recompute_granularity") == "selective":
        yield Verdict.ABSENT, Note("--recompute-granularity selective", "recompute whole layers, or nothing")
    if arguments.get("data_path"):
        words = " ".join(arguments["data_path"])
        text = "indexed datasets are not read yet: the data is mock, to measure with"
        yield Verdict.DIFFERS, Note(f"--data-path {words}", text)


def _dropout(arguments: dict[str, Any]) -> Iterator[Setting]:
    yield given_or_default(arguments, "model.dropout", "--hidden-dropout", 0.1)


def _data_parallel(script: Script, arguments: dict[str, Any]) -> int:
    """How many copies of the model the launcher's ranks hold; 1 where it does not say."""
    given = {name.lstrip("-").replace("_", "-"): values for name, values in read_flags(script.launcher)}
    counts = [given.get(name, ["1"])[:1] for name in _RANKS]
    world = 1
    for count in chain.from_iterable(counts):
        world *= int(count) if count.isdecimal() else 1
    tensor, pipeline = layout.sizes(arguments)
    return max(1, world // (tensor * pipeline))


def _once(settings: Iterable[Setting]) -> list[Setting]:
    """Each key once, the first that says it."""
    found: dict[str, Setting] = {}
    for setting in settings:
        found.setdefault(setting.key, setting)
    return list(found.values())
