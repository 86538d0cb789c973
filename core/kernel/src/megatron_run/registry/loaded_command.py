"""From an entry point to a command of ``megatron-run``: its module is imported, and its one hook asked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from megatron_run.errors import PluginError, RunError, let_end
from megatron_run.registry.choose import kernel_problem
from megatron_run.registry.commands import words_of
from megatron_run.registry.discover import Entry
from megatron_run.registry.hooks import in_one_line, missing_hook, registered, said_type
from megatron_run.registry.importing import import_entry

if TYPE_CHECKING:
    from click import Command

_HOOK = "megatron_run_commands"


def load_command(entry: Entry) -> Command:
    """Import the command of ``entry``.

    Raises :class:`PluginError` naming it, its distribution and what is wrong, with the whole cause chained; whatever
    its module raises ends here, but what tells this process to end.
    """
    if problem := kernel_problem(entry):
        raise PluginError(f"{_named(entry)} does not fit this kernel", why=problem, fix=f"upgrade {entry.distribution}")
    holder, _ = import_entry(entry, f"{_named(entry)} cannot be imported", "", f"uninstall {entry.distribution}")
    return _of(_asked(holder, entry), entry)


def _named(entry: Entry) -> str:
    return f"the command {words_of(entry)!r} of {entry.source}"


def _asked(holder: object, entry: Entry) -> object:
    """The answer of the hook."""
    try:
        manager = registered(holder, str(entry))
    except PluginError as cause:
        raise _breaks(entry, cause.what) from cause
    if not manager.hook.megatron_run_commands.get_hookimpls():
        raise _breaks(entry, missing_hook(holder, _HOOK))
    try:
        return manager.hook.megatron_run_commands()
    except RunError:
        raise
    except BaseException as cause:
        let_end(cause)
        raise _breaks(entry, f"{_HOOK} failed: {in_one_line(cause)}") from cause


def _of(offered: Any, entry: Entry) -> Command:
    if not isinstance(offered, Mapping):
        raise _breaks(entry, f"{_HOOK} returned {said_type(offered)}, and must return commands by name")
    if entry.name not in offered:
        has = ", ".join(map(repr, offered)) or "none"
        raise _breaks(entry, f"{_HOOK} returned no {entry.name!r}, which its entry point names; it has {has}")
    command: Command = offered[entry.name]
    if not callable(getattr(command, "make_context", None)):
        raise _breaks(entry, f"{_HOOK} returned {said_type(command)} as {entry.name!r}, which is no click.Command")
    return command


def _breaks(entry: Entry, why: str) -> PluginError:
    return PluginError(
        f"{_named(entry)} breaks its contract", why=why, fix=f"uninstall {entry.distribution}, or correct it"
    )
