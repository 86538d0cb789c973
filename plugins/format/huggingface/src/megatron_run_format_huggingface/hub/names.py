"""Names of the Hub: ``ORG/NAME@REVISION`` of a model or tokenizer; of a dataset also what of it is read."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from megatron_run.errors import InputError

#: What comes before the colon.
SCHEME = "hf"
_WORD = r"[A-Za-z0-9][A-Za-z0-9._-]*"
#: A branch, a tag, a commit, or a reference of the Hub's own as ``refs/pr/1``; as in the library's file system.
_REVISION = rf"refs/(?:pr|convert)/{_WORD}|{_WORD}"
_NAME = re.compile(rf"(?P<repository>{_WORD}(?:/{_WORD})?)(?:@(?P<revision>{_REVISION}))?(?:/(?P<inside>.+))?")
_COMMIT = re.compile(r"[0-9a-f]{40}")
#: The kinds of repository, as the library calls them.
MODEL, DATASET = "model", "dataset"


class HubName(NamedTuple):
    """A repository of the Hub: of a ``kind``, at a ``revision`` if that is said, and which files ``inside`` it."""

    repository: str
    kind: str = MODEL
    revision: str | None = None
    inside: str = ""

    def __str__(self) -> str:
        revision = f"@{self.revision}" if self.revision else ""
        return f"{SCHEME}:{self.repository}{revision}{'/' if self.inside else ''}{self.inside}"


def parse(text: str, kind: str) -> HubName:
    """The name ``text``, without the scheme. Raises :class:`InputError` for what can be none."""
    found = _NAME.fullmatch(text)
    part = found["inside"] if found else None
    if found is None or ".." in text or (part and kind == MODEL):
        form = "ORG/NAME[@REVISION]" if kind == MODEL else "ORG/NAME[@REVISION][/FILES]"
        raise InputError(f"{SCHEME}:{text} is no name of the Hub", fix=f"type {SCHEME}:{form}")
    return HubName(found["repository"], kind, found["revision"], part or "")


def at_home(path: Path) -> HubName | None:
    """The repository and commit of which ``path`` is a snapshot in the library's cache; None for another path.

    It lies there as ``models--ORG--NAME/snapshots/COMMIT``.
    """
    *_, repository, snapshots, commit = ("", "", "", *path.parts)
    kind, _, name = repository.partition("s--")
    if snapshots != "snapshots" or kind not in (MODEL, DATASET) or not _COMMIT.fullmatch(commit):
        return None
    return HubName(name.replace("--", "/"), kind, commit)
