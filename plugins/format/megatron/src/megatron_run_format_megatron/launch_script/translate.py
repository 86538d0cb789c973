"""From the text of a launch script to a configuration and what the user must know about it. Nothing is executed."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, takewhile
from math import prod
from pathlib import PurePath
from types import MappingProxyType
from typing import Any, NamedTuple

from megatron_run.config.yaml import flow
from megatron_run.errors import InputError
from megatron_run.errors.wording import plural
from megatron_run_format_megatron.launch_script import layer_kernels, run_keys
from megatron_run_format_megatron.launch_script.data_section import data, find_vocabulary, tokenizer_notes
from megatron_run_format_megatron.launch_script.flags import find, near
from megatron_run_format_megatron.launch_script.flags.kinds import Flag, Verdict, number, off, on, only, whole
from megatron_run_format_megatron.launch_script.model_section import (
    dispatcher_faults,
    expert_faults,
    experts,
    network,
    network_faults,
)
from megatron_run_format_megatron.launch_script.script import Script, is_known, read_script
from megatron_run_format_megatron.launch_script.settings import Setting, default_of, given_or_default

_TOLD = (Verdict.DIFFERS, Verdict.ABSENT, Verdict.SAME)
_WIDTH = 40  # columns before a comment
#: Flags of launchers (torchrun, srun, deepspeed) with ranks on a machine, and with machines.
_ON_ONE, _MACHINES = ("nproc-per-node", "ntasks-per-node", "num-gpus"), ("nnodes", "nodes", "num-nodes")
#: How many values a flag takes, where that is fixed.
_VALUES: Mapping[object, int] = MappingProxyType({on: 0, off: 0, only: 1, whole: 1, number: 1})
_NO_LATENTS = "without --multi-latent-attention nothing reads it"
_MOCK = "mock data has no documents: set it with data=indexed"
#: Why a flag decides nothing, where that is not plain.
_IDLE: Mapping[str, str] = MappingProxyType(
    {
        "--sequence-parallel": "there is one tensor-parallel rank, so nothing to split: Megatron clears it too",
        "--cp-comm-type": "there is one context-parallel rank, so nothing to split",
        "--data-path": "--mock-data comes before it",
        "--split": _MOCK,
        "--data-cache-path": _MOCK,
        "--reset-position-ids": _MOCK,
        "--reset-attention-mask": _MOCK,
        "--eod-mask-loss": _MOCK,
        **dict.fromkeys(("--q-lora-rank", "--kv-lora-rank", "--qk-head-dim", "--v-head-dim"), _NO_LATENTS),
        "--qk-pos-emb-head-dim": _NO_LATENTS,
        "--rotary-scaling-factor": _NO_LATENTS,
        "--qk-layernorm": "latents have norms",
    }
)
_UNREAD = "only a shell knows which flags these are"
#: The program whose flags these are.
_PROGRAM = "pretrain_gpt.py"


class Note(NamedTuple):
    """A remark on a flag: the flag as written, and what becomes of it."""

    flag: str
    text: str


@dataclass
class Translation:
    """The configuration that a script asks for, and remarks on what no key can express.

    ``notes`` are by verdict; ``open`` are flags whose value only a shell knows, ``unknown`` those that are not in the
    table, ``problems`` what was found about the script as a whole, ``start`` how to start as many ranks as it does.
    ``taken`` are the flags that become keys, as written.
    """

    settings: list[Setting] = field(default_factory=list)
    notes: dict[Verdict, list[Note]] = field(default_factory=lambda: {verdict: [] for verdict in Verdict})
    open: list[Note] = field(default_factory=list)
    unknown: list[Note] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    start: str = ""
    taken: dict[str, str] = field(default_factory=dict)

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
        lines = [f"{note.flag}: {note.text}" for note in self.notes[Verdict.DIFFERS]]
        lines += [f"{note.flag}: {note.text}" for note in (*self.open, *self.unknown)]
        return lines + self.problems + ([self.start] if self.start else [])

    @property
    def remarks(self) -> list[str]:
        """One line for each reason why a flag without a key changes nothing of what is learned."""
        flags: dict[str, list[str]] = {}
        for note in (*self.notes[Verdict.SAME], *self.notes[Verdict.ABSENT]):
            flags.setdefault(note.text, []).append(note.flag)
        return [f"{', '.join(written)}: {text}" for text, written in flags.items()]


def translate(text: str, name: str) -> Translation:
    """Read the launch script ``text`` of the file ``name``.

    Raises :class:`InputError` for a script that starts no training, and for a flag with an unreadable value.
    """
    script = read_script(text, name)
    found = Translation()
    arguments = _arguments(script, name, found)
    ranks = _launch(script, found)
    if script.branches:
        lines = ", ".join(map(str, script.branches))
        found.problems.append(f"the script decides something at line {lines}: every assignment was read, in order")
    if PurePath(script.program).name != _PROGRAM:
        found.problems.append(f"{script.program}: its flags were read as those of {_PROGRAM}, and the model is gpt")
    _note_faults(arguments, found)
    tensor, pipeline = run_keys.sizes(arguments)
    context = arguments.get("context_parallel_size", 1)
    batch = arguments.get("micro_batch_size", 1) * max(1, ranks // (tensor * context * pipeline))
    vocabulary = find_vocabulary(arguments)
    parts = (
        network(arguments),
        [vocabulary] if vocabulary else [],
        experts(arguments),
        [given_or_default(arguments, "model.dropout", "--hidden-dropout", 0.1)],
        run_keys.train(arguments, batch),
        run_keys.parallel(arguments),
        layer_kernels.layers(arguments),
        layer_kernels.capture(arguments),
        run_keys.scaler(arguments),
        run_keys.optimizer(arguments),
        data(arguments),
        run_keys.run(arguments),
    )
    found.settings = _once(chain.from_iterable(parts))
    _note_idle(found)
    return found


def _note_faults(arguments: dict[str, Any], found: Translation) -> None:
    """Note every flag with a value that no key can express."""
    differs, absent = found.notes[Verdict.DIFFERS], found.notes[Verdict.ABSENT]
    differs += [Note(*fault.split(": ", 1)) for fault in network_faults(arguments)]
    differs += [Note(*fault) for fault in expert_faults(arguments)]
    absent += [Note(*fault) for fault in dispatcher_faults(arguments)]
    for written, text, changes in layer_kernels.faults(arguments):
        (differs if changes else absent).append(Note(written, text))
    found.open += [Note(*note) for note in tokenizer_notes(arguments)]
    for verdict, note in _conflicts(arguments):
        found.notes[verdict].append(note)


def _note_idle(found: Translation) -> None:
    """Note the flags that become keys, but decide none beside the others that were given: nothing is left out."""
    notes = chain(*found.notes.values(), found.open)
    sources = " ".join(chain((setting.why for setting in found.settings), (note.flag for note in notes))) + " "
    for name, written in found.taken.items():
        flag = find(name)
        if flag is not None and not re.search(rf"{flag.name}(?![\w-])", sources.replace("_", "-")):
            text = _IDLE.get(flag.name, f"{flag.text} follows from the other flags")
            found.notes[Verdict.SAME].append(Note(written, text))


def read_flags(arguments: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Each flag with its values: ``--a 1 2 --b=3`` is ``("--a", ["1", "2"])``, ``("--b", ["3"])``."""
    name, values = "", list[str]()
    for argument in arguments:
        if argument.startswith("--"):
            if name:
                yield name, values
            name, equals, value = argument.partition("=")
            values = [value] if equals else []
        else:
            values.append(argument)
    if name:
        yield name, values


def _arguments(script: Script, name: str, found: Translation) -> dict[str, Any]:
    """The flags' values by Megatron's names. Flags without a key are noted; the last of repeated ones counts."""
    arguments, given = dict[str, Any](), dict[str, list[str]]()
    leading = takewhile(lambda argument: argument[:2] != "--", script.arguments)
    found.open += [Note(argument, _UNREAD) for argument in leading]
    for option, values in read_flags(script.arguments):
        if given.get(option, values) != values:
            found.problems.append(f"{_written(option, given[option])} is given again later, and the last one counts")
        given[option] = values
    if "--load" in given and given["--load"] == given.get("--save"):
        note = Note(_written("--load", given.pop("--load")), "a run resumes from its own folder")
        found.notes[Verdict.SAME].append(note)
    for option, values in given.items():
        flag, written = find(option), _written(option, values)
        if flag is None:
            meant = near(option)
            found.unknown.append(
                Note(written, "this flag is not known" + (f"; did you mean {meant!r}?" if meant else ""))
            )
        elif flag.verdict is Verdict.TAKEN:
            known = values[: _VALUES.get(flag.read)]
            if not all(map(is_known, known)):
                found.open.append(Note(written, f"only a shell knows the value: set {flag.text}"))
                continue
            rest = values[len(known) :]
            read = known if not any(map(is_known, rest)) else values
            found.open += [Note(argument, _UNREAD) for argument in rest if not is_known(argument)]
            arguments[flag.stored] = _read(flag, written, read, name)
            found.taken[option] = _written(option, read)
        elif flag.network:
            arguments[flag.stored] = " ".join(values) or True
            if not flag.differs(arguments[flag.stored]):
                found.notes[Verdict.SAME].append(Note(written, flag.text))
        else:
            same = flag.verdict is not Verdict.SAME and values and not flag.differs(values)
            found.notes[Verdict.SAME if same else flag.verdict].append(Note(written, flag.text))
    return arguments


def _written(option: str, values: Sequence[str]) -> str:
    """A flag as it is written."""
    return " ".join([option, *values])


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


def _launch(script: Script, found: Translation) -> int:
    """Note the launcher's flags and how to start as many ranks here; the number of ranks, 1 where it is not told."""
    counts, flags = dict.fromkeys((_ON_ONE, _MACHINES), 1), list[str]()
    for option, values in read_flags(script.launcher):
        name, written = option.lstrip("-").replace("_", "-"), _written(option, values[:1])
        which = next((names for names in counts if name in names), None)
        if which is None:
            found.notes[Verdict.SAME].append(Note(written, "the launcher's: megatron-run --nproc needs none"))
        elif values[:1] and values[0].isdecimal():
            counts[which] = int(values[0])
            flags.append(written)
        else:
            found.open.append(Note(written, "only a shell knows how many ranks that makes: say --nproc"))
    ranks, starts = prod(counts.values()), f"the script starts {{}} by {' '.join(flags)}"
    if counts[_MACHINES] > 1:
        each, machines = counts.values()
        command = f"torchrun --nproc-per-node {each} --nnodes {machines} ... -m megatron_run_cli FILE"
        found.start = f"{starts.format(f'{ranks} ranks on {machines} machines')}: say {command}"
    elif flags:
        found.start = f"{starts.format(plural(ranks, 'rank'))}: say megatron-run FILE --nproc {ranks}"
    return ranks


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
    lines += [f"# {translation.start[0].upper()}{translation.start[1:]}"] if translation.start else []
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
    lines = [f"#   {note.flag}: {note.text}" if note.text else f"#   {note.flag}" for note in notes]
    return ["#", f"# {heading}", *(line.replace("\n", " ") for line in lines)] if lines else []
