"""The notebooks of the documentation: stored as they ran, and run again they do what they show."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from tests.docs.notebooks import DIGEST, NOTEBOOKS, THERE, Cell, code, digest, is_stored, kinds, read, run, stored, text
from tests.support.checkout import ROOT

FIRST = ROOT / "docs" / "notebooks" / "first_model.ipynb"
CELL: Cell = {"cell_type": "code", "source": "", "execution_count": None, "outputs": []}
PRINTED = {"output_type": "stream", "name": "stdout"}


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], list[Cell]]:
    """Gives the cells of a notebook after they have run, which they do once."""

    @cache
    def cells(file: Path) -> list[Cell]:
        return code(run(file, tmp_path_factory.mktemp(file.stem)))

    return cells


@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_a_notebook_is_stored_as_it_ran_from_its_first_cell_to_its_last(file: Path) -> None:
    """So that a reader sees what it does, here and on the site, where no cell runs."""
    cells = code(read(file))
    assert [cell["execution_count"] for cell in cells] == [*range(1, len(cells) + 1)]
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert not [output for output in outputs if output["output_type"] == "error"]
    assert not any("Warning" in text(cell) for cell in cells), "a warning is no example"
    assert file.stat().st_size < 200_000
    assert not re.search(r"(?<![~\w/])/(tmp|home|root|work|Users)/", file.read_text(encoding="utf-8"))


@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_stored_outputs_are_of_the_code_beside_them(file: Path) -> None:
    notebook = read(file)
    assert notebook["metadata"][DIGEST] == digest(notebook), "the code has changed: run make docs"


def test_a_notebook_is_stored_again_when_its_code_changes_or_the_kinds_of_its_outputs(tmp_path: Path) -> None:
    notebook = {"metadata": {}, "cells": [{**CELL, "source": "print(1)"}]}
    ran = {"cells": [{**CELL, "execution_count": 1, "outputs": [{**PRINTED, "text": "1"}]}]}
    assert not is_stored(notebook, ran)
    notebook = json.loads(stored(notebook, ran, tmp_path))
    assert is_stored(notebook, ran)
    ran["cells"][0]["outputs"] = [{**PRINTED, "text": "2"}]
    assert is_stored(notebook, ran), "two runs differ"
    notebook["cells"][0]["source"] = ["print(\n", "2)"]
    assert not is_stored(notebook, ran)
    notebook["metadata"][DIGEST] = digest(notebook)
    assert is_stored(notebook, ran)
    ran["cells"][0]["outputs"] = [{**PRINTED, "name": "stderr", "text": "2"}]
    assert not is_stored(notebook, ran)


def test_stored_outputs_name_no_folder_of_this_machine(tmp_path: Path) -> None:
    output = {**PRINTED, "text": f"in {tmp_path}/runs/a"}
    ran = {"cells": [{**CELL, "execution_count": 1, "outputs": [output]}]}
    assert f"in {THERE}/runs/a" in stored({"metadata": {}, "cells": [{**CELL}]}, ran, tmp_path)
    assert kinds(ran["cells"][0]) == ["stdout"]


@pytest.mark.nightly
@pytest.mark.multiproc
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_a_notebook_does_what_it_shows(file: Path, ran: Callable[[Path], list[Cell]]) -> None:
    """By the kind of each output: losses and what a model writes differ from one machine to another."""
    assert [*map(kinds, ran(file))] == [*map(kinds, code(read(file)))]


@pytest.mark.nightly
@pytest.mark.multiproc
@pytest.mark.timeout(1000)
def test_the_first_model_learns_a_text_and_then_another(ran: Callable[[Path], list[Cell]]) -> None:
    cells = ran(FIRST)
    trainings = [text(cell) for cell in cells if "validation loss" in text(cell)]
    assert len(trainings) == 2
    for said in trainings:
        assert ", below the token bigram's" in said
        assert re.search(r"^step (\d+)/\1  loss", said, re.MULTILINE), "the bar ends with the last step"
    assert any("Beautiful is better than ugly.\nExplicit" in text(cell) for cell in cells[-2:])
