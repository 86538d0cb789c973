"""The presets, configurations that come with the kernel. Listing them is instant: nothing of pydantic or YAML."""

from __future__ import annotations

from importlib.resources import files

from megatron_run.errors import InputError
from megatron_run.errors.wording import did_you_mean


def presets() -> dict[str, str]:
    """Each preset's name, and the first line of its comment."""
    folder = files("megatron_run") / "presets"
    found = (entry for entry in folder.iterdir() if entry.name.endswith(".yaml"))
    return {
        entry.name.removesuffix(".yaml"): entry.read_text("utf-8").partition("\n")[0].lstrip("# ")
        for entry in sorted(found, key=lambda entry: entry.name)
    }


def read_preset(name: str) -> str:
    """The text of the preset ``name``. Raises :class:`InputError` for an unknown one."""
    known = presets()
    if name not in known:
        raise InputError(
            f"there is no preset {name!r}",
            fix=did_you_mean(name, known) or f"the presets are {', '.join(known)}",
        )
    return (files("megatron_run") / "presets" / f"{name}.yaml").read_text("utf-8")
