"""The identity of a run, and which of its configuration keys may change between two attempts.

Keys that decide what is learned are the run's identity. A change of one needs the user's word (``--extend``,
``--allow-change KEY``), and is then told and recorded: weights, moments, sample position and random streams go on. Keys
that give the saved state its meaning never change within a run; ``run.init_from`` starts another one from its weights.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any, NamedTuple

from megatron_run.config.fields import default_of, meanings, walk
from megatron_run.config.origin import DEFAULT, KIND_SECTIONS, dotted
from megatron_run.config.run_home import config_file, run_home
from megatron_run.config.values import leaves, plain
from megatron_run.contracts.meaning import BETWEEN_ATTEMPTS, FIXED, LEARNED, LENGTH, NOT_LEARNED
from megatron_run.contracts.schema import SECTIONS, Header
from megatron_run.errors import InputError
from megatron_run.errors.wording import advice, did_you_mean
from megatron_run.planning.run import sections
from megatron_run_engine.run_folder.idle_options import idle_keys

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

    from megatron_run.config.origin import Key
    from megatron_run.config.request import Request
    from megatron_run.contracts.meaning import Meaning
    from megatron_run.planning import ResolvedRun


#: Kinds that save state. Whether another plugin can read that state is decided when a checkpoint is resumed.
STATEFUL = ("optimizer", "scaler")
#: Names a file, whose content decides what is learned, and not where it lies.
_TOKENIZER = "data.tokenizer"


def meaning_of_keys(run: ResolvedRun) -> dict[str, frozenset[Meaning]]:
    """Every dotted key that may decide what is learned, with what its field says of itself."""
    return {dotted(key): meanings(field) for key, field in _fields(run)}


def _fields(run: ResolvedRun) -> Iterator[tuple[Key, FieldInfo]]:
    """The fields of the sections that decide what is learned, with their keys."""
    yield from walk(Header)
    for name in LEARNED:
        if name in SECTIONS:
            yield from walk(SECTIONS[name], (name,))
        elif name in KIND_SECTIONS:
            yield from walk(run.one(KIND_SECTIONS[name]).options_model, (name,))


def identity(run: ResolvedRun) -> dict[str, Any]:
    """Return every dotted key that decides what is learned, with its resolved value, as plain JSON."""
    everything, meaning = sections(run), meaning_of_keys(run)
    chosen = {name: everything[name] for name in LEARNED}
    keys = {".".join(key): value for key, value in leaves(chosen)}
    return {key: value for key, value in keys.items() if NOT_LEARNED not in _marks(key, meaning)}


def _marks(key: str, meaning: Mapping[str, frozenset[Meaning]]) -> frozenset[Meaning]:
    """The marks of ``key``, or of the field that holds it, as an entry of a mapping."""
    while key and key not in meaning:
        key = key.rpartition(".")[0]
    return meaning.get(key, frozenset())


def with_added_options(saved: Mapping[str, Any], run: ResolvedRun) -> dict[str, Any]:
    """The identity ``saved``, with the default of each option that the version which saved it did not have.

    Its model and its training were those that the defaults describe. An option that was unset is saved as such, and
    stays.
    """
    now = identity(run)
    owners = {"train", "model"} if saved.get("model.use") == now["model.use"] else {"train"}
    fields = {dotted(key): field for key, field in _fields(run) if key[0] in owners and not field.is_required()}
    usual = {key: plain(default_of(field)) for key, field in fields.items() if key in now and not _within(key, saved)}
    return {**usual, **saved}


def _within(key: str, saved: Mapping[str, Any]) -> bool:
    """Whether ``key`` lies in a group that was unset, and so is no option that was added since."""
    *groups, _ = accumulate(key.split("."), "{}.{}".format)
    return any(group in saved for group in groups)


def with_moved_tokenizer(saved: Mapping[str, Any], now: Mapping[str, Any], home: Path) -> dict[str, Any]:
    """The identity ``saved``, with the tokenizer's name of ``now`` where that is the file kept in the run at ``home``.

    A run that was carried elsewhere has the same tokenizer under another path.
    """
    name = now.get(_TOKENIZER)
    if not isinstance(saved.get(_TOKENIZER), str) or not isinstance(name, str) or saved[_TOKENIZER] == name:
        return dict(saved)
    from megatron_run_engine.checkpoint.kept_files import is_kept  # with NumPy, which no other launch needs

    return {**saved, _TOKENIZER: name} if is_kept(home, name) else dict(saved)


def digest(keys: Mapping[str, Any]) -> str:
    """Return the SHA-256 of an identity in hexadecimal."""
    return hashlib.sha256(json.dumps(keys, sort_keys=True).encode()).hexdigest()


#: Digits of a hash that are shown, and the words before the key whose contents it is of.
_DIGITS, _CONTENTS = 12, "contents of "


class Change(NamedTuple):
    """A key with its value ``before`` and ``now``; None for a key that is unset.

    It is ``fixed`` where the saved state would mean something else.
    """

    key: str
    before: Any
    now: Any
    fixed: bool = False

    def __str__(self) -> str:
        before, now = ("unset" if value is None else value for value in (self.before, self.now))
        return f"{self.key}={before}, now {now}"

    @classmethod
    def of_content(cls, key: str, before: str | None, now: str | None) -> Change:
        """A change of what ``key`` names, whose value is the same, by the hashes of the contents."""
        short = [None if value is None else value[:_DIGITS] for value in (before, now)]
        return cls(f"{_CONTENTS}{key}", short[0], short[1])

    @property
    def by_content(self) -> bool:
        """Whether it is a change of contents, which no configuration shows."""
        return self.key.startswith(_CONTENTS)

    @property
    def longer(self) -> bool:
        """Whether the run gets longer by it."""
        return self.key in LENGTH and None not in (self.before, self.now) and self.now > self.before


def find_changes(before: Mapping[str, Any], run: ResolvedRun, dropped: Collection[str] = ()) -> tuple[Change, ...]:
    """Return how the identity ``before`` differs from that of ``run``, in order of the keys.

    A value that means the same to its plugin is no change.
    For a kind in ``STATEFUL`` another plugin is no change, nor are options that only one of the two plugins has. Kinds
    in ``dropped`` start their state anew, so that nothing of theirs is a change.
    """
    now, meaning = identity(run), meaning_of_keys(run)
    before = {key: value for key, value in before.items() if NOT_LEARNED not in _marks(key, meaning)}
    unequal = [key for key in sorted(before.keys() | now.keys()) if before.get(key) != now.get(key)]
    idle = idle_keys(before, run, unequal)
    differing = [key for key in unequal if key not in idle]
    replaced = [kind for kind in STATEFUL if f"{kind}.use" in differing]

    def counts(key: str) -> bool:
        section, _, name = key.partition(".")
        in_both = name != "use" and key in before and key in now
        return section not in dropped and (section not in replaced or in_both)

    def fixed(key: str) -> bool:
        marks = _marks(key, meaning)
        return FIXED in marks or (key.startswith("model.") and not marks & BETWEEN_ATTEMPTS)

    return tuple(Change(key, before.get(key), now.get(key), fixed(key)) for key in differing if counts(key))


class Refusal(NamedTuple):
    """Why a run cannot go on, and what to type instead."""

    why: str
    fix: str


def find_refusal(
    found: Sequence[Change], request: Request, weights: Path, decided: Collection[str] = ()
) -> Refusal | None:
    """Return why a run cannot go on with the changes ``found``; None if ``request`` allows them all.

    ``decided`` are keys that an earlier attempt was allowed to change. ``weights`` is where the state lies.
    """
    fixed = [change for change in found if change.fixed]
    refused = fixed or [change for change in found if not (change.key in decided or allows(request, change))]
    if not refused:
        return None
    keys = [change.key for change in refused]
    anew = f"for a new run from its weights: another run.folder with --set {quote(f'run.init_from={weights}')}"
    if fixed and all(key.startswith("optimizer.") for key in keys):
        first = "to start the moments anew: --allow-plugin-change optimizer"
    elif fixed:
        first = "what is saved has no meaning under other values: give the same"
    elif all(change.longer for change in refused):
        before = " ".join(f"--set {quote(f'{change.key}={change.before}')}" for change in refused)
        first = f"to end where it would have: {before}; to train on: --extend"
    else:
        first = f"to go on with them: --allow-change {','.join(keys)}"
    return Refusal(", ".join(map(str, refused)), advice(first, anew))


def has_trained(path: Path) -> bool:
    """Whether a run in the folder ``path`` saved a step or wrote metrics. If not, another configuration may take it."""
    return any((path / "checkpoints").glob("step*")) or os.path.lexists(path / "metrics.jsonl")


def allows(request: Request, change: Change) -> bool:
    """Whether ``request`` has the word that ``change`` needs."""
    return (request.extend and change.longer) or any(_covers(name, change.key) for name in request.allow_change)


def _covers(name: str, key: str) -> bool:
    """Whether ``name`` is ``key`` or a section of it, with ``-`` or ``_`` in its words as in ``--set``."""
    return f"{key}.".replace("-", "_").startswith(f"{name}.".replace("-", "_"))


def allows_other_data(request: Request, found: Sequence[Change]) -> bool:
    """Whether the samples may be others: a key of the data was changed, or ``request`` names the data."""
    return "data" in request.allow_change or any(change.key.startswith("data.") for change in found)


def check_names(request: Request, run: ResolvedRun) -> None:
    """Raise :class:`InputError` for a name in ``request.allow_change`` that is no key of ``run`` and no section."""
    keys = [".".join(key) for key, _ in leaves(sections(run))]
    for name in request.allow_change:
        if not any(_covers(name, key) for key in keys):
            raise InputError(
                f"--allow-change {name}: there is no such key", fix=did_you_mean(name, keys) or "name a key as train.lr"
            )


def check_goes_on(run: ResolvedRun, looked: Path | None = None) -> None:
    """Raise :class:`InputError` for an option about going on (``--extend``, ...) where ``run`` goes on from nothing.

    ``looked`` is where no run was found; None before that is known. There a script may begin what it extends later:
    refused are a step by its number, and a configuration that was moved with its run, which says where that is.
    """
    folders, request = run.config.run, run.request
    if folders.branch_from or (folders.folder and looked is None):
        return
    about = {
        "--extend": request.extend,
        "--allow-change": request.allow_change and not folders.init_from,  # which asks for it with another tokenizer
        "--allow-plugin-change": request.allow_plugin_change,
        f"--resume {request.resume}": request.resume not in ("auto", "never"),
    }
    option = next((option for option, given in about.items() if given), None)
    if option is None:
        return
    origin = run.origins.get(("run", "folder"), DEFAULT)
    config = config_file(origin)
    home = None if config is None else run_home(config)
    if looked is not None and home is None and not option.startswith("--resume"):
        return
    if looked is None or home is not None:
        fix = f"add --set {quote(f'run.folder={home}')}" if home else "add --set run.folder=FOLDER, as runs/latest"
    else:
        fix = f"name the folder of a run with --set run.folder=FOLDER, or leave {option} out to begin one"
    there = f"there is none in {looked}" if looked else "run.folder names none"
    raise InputError(
        f"{option} is about a run that goes on, and {there}", origin=str(origin) if looked else "", fix=fix
    )
