"""The notebooks of the documentation: stored as they ran, and run again they do what they show."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.notebooks import NOTEBOOKS, THERE, Cell, code, kinds, read, run, stored, text


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


def test_stored_outputs_name_no_folder_of_this_machine(tmp_path: Path) -> None:
    cell: Cell = {"cell_type": "code", "source": "", "execution_count": None, "outputs": []}
    output = {"output_type": "stream", "name": "stdout", "text": f"in {tmp_path}/runs/a"}
    ran = {"cells": [{**cell, "execution_count": 1, "outputs": [output]}]}
    assert f"in {THERE}/runs/a" in stored({"cells": [cell]}, ran, tmp_path)
    assert kinds(ran["cells"][0]) == ["stdout"]


@pytest.mark.nightly
@pytest.mark.multiproc
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_a_notebook_does_what_it_shows(file: Path, tmp_path: Path) -> None:
    """By the kind of each output: losses and what a model writes differ from one machine to another."""
    shown, ran = code(read(file)), code(run(file, tmp_path))
    assert [*map(kinds, ran)] == [*map(kinds, shown)]
    trainings = [text(cell) for cell in ran if "validation loss" in text(cell)]
    assert len(trainings) == 2
    for said in trainings:
        assert ", below the token bigram's" in said
        assert re.search(r"^step (\d+)/\1  loss", said, re.MULTILINE), "the bar ends with the last step"
    assert any("Beautiful is better than ugly.\nExplicit" in text(cell) for cell in ran[-2:])
