"""Run folders that a configuration names, as ``runs/latest`` too, and the one in which it lies: it may be another."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from dataclasses import replace
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

from megatron_run.files.foreign_file import read_file
from megatron_run.files.latest_run import follow_latest

if TYPE_CHECKING:
    from megatron_run.config.merge import ConfigSource
    from megatron_run.config.origin import Origin
    from megatron_run.config.request import Request


#: How the ``config.yaml`` begins that an import writes beside its weights.
IMPORT_HEAD = "# Imported from "
#: The kernel's keys that name a run, ``branch_from`` with ``@STEP``.
_RUNS = (("run", "folder"), ("run", "init_from"), ("run", "branch_from"))


def run_and_step(text: str) -> tuple[str, str]:
    """``RUN@STEP`` as RUN and ``@STEP``; the latter is empty where no step is named."""
    run, at, step = text.rpartition("@")
    return (run, f"{at}{step}") if at else (text, "")


def name_runs(merged: ConfigSource, latest: MutableMapping[str, str]) -> None:
    """Put the run itself where ``merged`` says ``runs/latest``, which another run may be when it is read again.

    ``latest`` is what :func:`follow_latest` knows.
    """
    for key in _RUNS:
        value = merged.values.get(key)
        if value is None or not isinstance(value.data, str | Path):
            continue
        text = str(value.data)
        run, step = run_and_step(text) if key[-1] == "branch_from" else (text, "")
        named = Path(run).expanduser()
        if (lies := follow_latest(named, latest)) != named:
            merged.values[key] = replace(value, data=type(value.data)(f"{lies}{step}"))


def follow_moved_weights(merged: ConfigSource, notices: list[str]) -> None:
    """Read the paths of an imported folder that was moved as those of where its ``config.yaml`` lies now.

    An import names itself in ``run.init_from``, and its tokenizer. Where that folder is there still it is meant. What a
    user has written is read as it stands.
    """
    weights = merged.values.get(("run", "init_from"))
    config = None if weights is None else config_file(weights.origin)
    if weights is None or config is None:
        return
    named, here = Path(str(weights.data)), config.absolute().parent
    if named.expanduser().exists() or not (here / "checkpoints").is_dir() or not _is_of_an_import(config):
        return
    for key, value in merged.values.items():
        inside = isinstance(value.data, str | Path) and config_file(value.origin) == config
        if inside and Path(str(value.data)).is_relative_to(named):
            moved = here / Path(str(value.data)).relative_to(named)
            merged.values[key] = replace(value, data=type(value.data)(str(moved)))
    notices.append(f"{config} was moved with its weights: {named} is read as {here}")


def _is_of_an_import(config: Path) -> bool:
    try:
        return read_file(config).startswith(IMPORT_HEAD.encode())
    except OSError:
        return False


def config_file(origin: Origin) -> Path | None:
    """The configuration file in which a value of ``origin`` stands; None for a value from elsewhere."""
    return Path(origin.place.rpartition(" line ")[0]) if origin.source == "file" else None


def run_home(config: Path) -> Path | None:
    """The run folder in which the file ``config`` lies, or in the logs of one of its attempts; None for any other."""
    beside = config.absolute().parent
    homes = (beside, beside.parent.parent) if config.is_file() else ()  # the latter of logs/attempt-001/
    return next((folder for folder in homes if (folder / "run.json").exists()), None)


def home_notices(merged: ConfigSource, request: Request) -> Iterator[str]:
    """Notices about the folder that ``run.folder`` names: there is no run to go on with, or it was another one's."""
    value = merged.values.get(("run", "folder"))
    if value is not None and value.data is not None:
        named = Path(str(value.data)).expanduser()
        yield from _begun(named, merged, request)
        yield from _moved(named.absolute(), config_file(value.origin))


def _begun(named: Path, merged: ConfigSource, request: Request) -> Iterator[str]:
    """A notice where ``request`` is to go on with a run, and there is none in ``named``."""
    option = "--extend" if request.extend else "--allow-change" if request.allow_change else ""
    alone = merged.values.keys().isdisjoint({("run", "init_from"), ("run", "branch_from")})  # of other runs
    if option and alone and not (named / "run.json").exists():
        yield f"{option} is about a run that goes on, and there is none in {named} yet: this begins one"


def _moved(named: Path, config: Path | None) -> Iterator[str]:
    """A notice where ``config``, which names the folder, lies in another run's, as one that was moved with its run."""
    home = None if config is None else run_home(config)
    if home is not None and named.resolve() != home.resolve():
        yield (
            f"{config} lies in the run folder {home}, and its run.folder is {named}: "
            f"to go on with the run in {home} add --set {quote(f'run.folder={home}')}"
        )
