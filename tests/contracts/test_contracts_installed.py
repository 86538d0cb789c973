"""Every installed plugin, whoever wrote it, keeps the contract of its kind."""

from __future__ import annotations

import pytest

from megatron_run.contracts.plugin import KINDS
from megatron_run_testing.conformance import SUITES, checks_for
from tests.contracts.conformance import installed_plugins
from tests.support.first_party import plugins

#: They need a library, a server or files: their tests run this suite, te's on a GPU with it and elsewhere on a
#: stand-in.
ELSEWHERE = {"parallel-layer=te", "graph-capture=te", "graph-capture=compile", "optimizer=deepspeed", "observer=mlflow"}
ELSEWHERE |= {"data=instruct", "observer=wandb"}
CASES = {
    f"{name}: {check.name}": check
    for name, plugin in installed_plugins()
    if str(plugin) not in ELSEWHERE
    for check in checks_for(plugin)
}
NAMES = tuple(CASES)
#: Variants of which tests of their own show by day what is theirs: overlap in what tensor-parallel ranks count, whole
#: matrices in zero1's pairs of runs, the pieces of a decoder in those of the network, and windows in the scaler's.
BY_NIGHT = {
    "parallel-layer=tensor as without overlap",
    "optimizer=zero1 as of whole matrices",
    "model=gpt as neox",
    "model=gpt as olmo",
    "model=gpt as gemma",
    "model=bert as norms after sums",
    "scaler=dynamic as short window",
}


@pytest.mark.usefixtures("fork_server", "forked_elsewhere")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.nightly] * (name.partition(":")[0] in BY_NIGHT)) for name in NAMES]
)
def test_an_installed_plugin_conforms(name: str) -> None:
    CASES.pop(name).run()  # the last check of a plugin lets go of its data


def test_every_kind_has_a_suite_and_a_plugin_that_it_is_run_on() -> None:
    assert list(SUITES) == list(KINDS)
    assert {name.partition(":")[0] for name in NAMES} >= {str(each) for each in plugins()} - ELSEWHERE
