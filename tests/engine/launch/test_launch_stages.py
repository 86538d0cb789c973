"""The list of a start in the launcher's docstring names what there is."""

from __future__ import annotations

import re
from importlib import import_module
from operator import attrgetter

import pytest

import megatron_run_engine.launch
from tests.architecture.house import House
from tests.support.checkout import ROOT

#: Lines of the list: a module and what it has, with what that does.
NAMED = re.findall(r"^ +(\w+)\.([\w.]+)(?=  |$)", megatron_run_engine.launch.__doc__ or "", re.MULTILINE)
FILES = House(ROOT).files


def test_the_list_is_found() -> None:
    assert len(NAMED) > 15


@pytest.mark.parametrize(("module", "name"), NAMED)
def test_a_stage_of_a_start_is_a_name_of_its_file(module: str, name: str) -> None:
    (found,) = (each for each in FILES if each.rpartition(".")[2] == module and _of_a_start(each))
    attrgetter(name)(import_module(found))


def _of_a_start(module: str) -> bool:
    """Whether ``module`` is of the engine, or plans: elsewhere a file may have the same name."""
    return module.startswith(("megatron_run_engine.", "megatron_run.planning."))
