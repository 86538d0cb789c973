"""Names of a model, tokenizer or dataset of another place, as ``hf:ORG/NAME``: from there to this machine.

Which names those are, a format says: it has the scheme before the colon. Whoever takes a folder from a user asks
:func:`fetch` or :func:`local_folder` once, where the name is typed, and hands on the folder on this machine: so what is
read is read as any other folder, and what somebody else has written into a file fetches nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from megatron_run.contracts.format import FETCH, Fetched, Wanted
from megatron_run.errors import PluginError
from megatron_run.registry.choose_format import installed_formats
from megatron_run.registry.discover import scan
from megatron_run.registry.known import known_providers

_NAME = re.compile(r"([a-z][a-z0-9]*):(.+)")


def _silent(_line: str) -> None:
    """Tells nobody."""


def fetch(
    typed: str, wanted: Wanted, tell: Callable[[str], None] = _silent, before: Path | None = None
) -> Fetched | None:
    """Fetch what is ``wanted`` of the name that is ``typed``; None where that is a path. See :meth:`Format.fetch`.

    Raises :class:`~megatron_run.errors.RunError`, also where no installed format knows the scheme and one would.
    """
    named = _NAME.fullmatch(typed)
    if named is None:
        return None
    scheme, name = named.groups()
    catalog = scan()
    formats = installed_formats((FETCH,), catalog)[0]
    for each in formats:
        if each.made.scheme == scheme:
            return each.fetch(name, wanted, tell, before)
    absent = [known for known in known_providers(FETCH) if not catalog.offering(known.kind, known.name)]
    if absent and not Path(typed).exists():
        fix = f"type: {' or '.join(dict.fromkeys(each.how_to_get for each in absent))}"
        raise PluginError(f"{typed} is not fetched", why=f"no installed format knows {scheme}:", fix=fix)
    return None


def local_folder(path: Path, tell: Callable[[str], None] = _silent) -> Path:
    """``path``, or the folder on this machine of the model that it names, as ``hf:ORG/NAME``. Raises as :func:`fetch`.

    Only for what a user has typed.
    """
    found = fetch(str(path), "model", tell)
    return path if found is None else found.folder
