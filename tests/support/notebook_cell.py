"""The cell of a notebook, without IPython."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest


class Cell:
    """The outputs of a notebook's cell, as IPython's ``display`` makes and replaces them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.outputs: list[dict[str, str]] = []
        self.drawn = 0
        fake: Any = ModuleType("IPython.display")
        fake.display = self.display
        monkeypatch.setitem(sys.modules, "IPython", ModuleType("IPython"))
        monkeypatch.setitem(sys.modules, "IPython.display", fake)

    def display(self, shown: dict[str, str], *, raw: bool, display_id: bool) -> Any:
        assert raw
        assert display_id
        place = len(self.outputs)
        self.outputs.append(shown)
        cell = self

        class Handle:
            def update(self, shown: dict[str, str], *, raw: bool) -> None:
                cell.outputs[place] = shown
                cell.drawn += 1

        return Handle()
