"""The JSON schema beside configurations, by which an editor completes and checks them."""

from __future__ import annotations

import os
from pathlib import Path

#: Its file in a folder of configurations.
SCHEMA = "megatron-run.schema.json"


def schema_line(folder: Path) -> str:
    """The first line of a YAML file in ``folder``: it leads editors to the schema there, or in the current folder.

    Empty where neither has one, since an editor complains of a schema that is missing.
    """
    found = next((place / SCHEMA for place in (folder, Path()) if (place / SCHEMA).is_file()), None)
    return f"# yaml-language-server: $schema={os.path.relpath(found, folder)}\n" if found else ""
