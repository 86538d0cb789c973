"""Fill the root distribution's dependencies from the member folders of this checkout.

In a checkout each member is a direct reference to its folder, so that ``pip install .`` installs exactly this tree.
With ``MEGATRON_RUN_RELEASE=1`` each is ``name==version``, which is what a published distribution may say.
"""

from __future__ import annotations

import os
import tomllib
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface


class MemberDependencies(MetadataHookInterface):
    """Called by hatchling while it builds the root distribution."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set ``dependencies`` to the core, the command line and every first-party plugin."""
        root = Path(self.root)
        release = os.environ.get("MEGATRON_RUN_RELEASE") == "1"
        members = [sorted(root.glob(f"{each}/pyproject.toml")) for each in ("core/*", "cli", "plugins/*/*")]
        metadata["dependencies"] = [requirement(file.parent, release) for files in members for file in files]


def requirement(folder: Path, release: bool) -> str:
    """One dependency line for the member in ``folder``."""
    project = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    source = f"=={project['version']}" if release else f" @ {folder.resolve().as_uri()}"
    return f"{project['name']}{source}"
