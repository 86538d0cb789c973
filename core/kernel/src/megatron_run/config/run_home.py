"""The run folder in which a configuration lies, which need not be the one that its ``run.folder`` names."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_run.config.merge import ConfigSource
    from megatron_run.config.origin import Origin


def config_file(origin: Origin) -> Path | None:
    """The configuration file in which a value of ``origin`` stands; None for a value from elsewhere."""
    return Path(origin.place.rpartition(" line ")[0]) if origin.source == "file" else None


def run_home(config: Path) -> Path | None:
    """The run folder in which the file ``config`` lies, or in the logs of one of its attempts; None for any other."""
    beside = config.absolute().parent
    homes = (beside, beside.parent.parent) if config.is_file() else ()  # the latter of logs/attempt-001/
    return next((folder for folder in homes if (folder / "run.json").exists()), None)


def home_notices(merged: ConfigSource) -> Iterator[str]:
    """A notice where the file that names ``run.folder`` lies in another run's folder, as one that was moved."""
    value = merged.values.get(("run", "folder"))
    config = None if value is None else config_file(value.origin)
    home = None if config is None else run_home(config)
    if value is None or value.data is None or home is None:
        return
    named = Path(str(value.data)).expanduser().absolute()
    if named.resolve() != home.resolve():
        yield (
            f"{config} lies in the run folder {home}, and its run.folder is {named}: "
            f"to go on with the run in {home} add --set {quote(f'run.folder={home}')}"
        )
