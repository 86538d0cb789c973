from __future__ import annotations

import sys
from dataclasses import asdict

import pytest

from megatron_run.errors import ExitCode, PluginError
from megatron_run.registry.choose import choose
from megatron_run.registry.discover import scan
from megatron_run.registry.load import load
from megatron_run_cli.reports.keys import Description, KeyInfo
from megatron_run_cli.reports.listing import list_plugins, plugin_info, why
from megatron_run_cli.reports.probe import probe
from tests.support.fake_plugins import FakeSite, schedule_source

OPTIONS = '''
from typing import Literal
from pydantic import BaseModel, ConfigDict, Field
class Options(BaseModel):
    """Options."""
    model_config = ConfigDict(frozen=True, extra="forbid")
    size: int = Field(4, ge=1, lt=64, description="how large")
    shape: Literal["round", "square"] = "round"
    paths: tuple[str, ...] = ("a", "b")
    needed: float | None
'''
DESCRIBED = OPTIONS + schedule_source().replace(
    '"zigzag")',
    '"zigzag", options=Options, provides=frozenset({"parallel.pipeline"}), suggests={"parallel.pipeline": 2},'
    'suggests_with={"shape=square": {"parallel.chunks": 2}})',
)


def broken_site(site: FakeSite) -> dict[str, str]:
    """Plugins that go wrong in every way, two that work between them; name -> what the list must say."""
    causes = {
        "aborts": ("import os; os.abort()", "importing it ended the process with code -6"),
        "exits": ("import os; os._exit(7)", "importing it ended the process with code 7"),
        "fine": (schedule_source("fine"), ""),
        "prints": ("print('noise')\n" + schedule_source("prints"), ""),
        "quits": ("raise SystemExit(3)", "SystemExit: 3"),
        "raises": ("1/0", "ZeroDivisionError: division by zero"),
        "wrong": (schedule_source("other"), "megatron_run_plugin_info says schedule=other, and it was chosen as"),
    }
    for name, (source, _) in causes.items():
        site.schedule(name, source, distribution=f"acme-{name}")
    return {name: problem for name, (_, problem) in causes.items()}


def test_listing_imports_nothing_and_knows_metadata_problems(site: FakeSite) -> None:
    broken_site(site)
    site.schedule("raises", distribution="acme-again")
    site.distribution("acme-new", {"schedule": {"new": "acme_new"}}, requires=["megatron-run-core>=7"])
    listing = list_plugins(scan(site.path))
    problems = {each.distribution: (each.state, each.problem) for each in listing.plugins if each.problem}
    assert problems == {
        "acme-again": ("AMBIGUOUS", "acme-raises 1.0 offers schedule=raises too: choose acme-again:raises"),
        "acme-raises": ("AMBIGUOUS", "acme-again 1.0 offers schedule=raises too: choose acme-raises:raises"),
        "acme-new": ("BROKEN", "it needs megatron-run-core>=7, and 0.1.0 is installed"),
    }
    assert {each.state for each in listing.plugins if not each.problem} == {""}
    assert not [name for name in sys.modules if name.startswith("acme_")]


def test_a_checked_listing_survives_every_broken_plugin(site: FakeSite) -> None:
    expected = broken_site(site)
    site.distribution("acme-new", {"schedule": {"new": "acme_new"}}, requires=["megatron-run-core>=7"])
    expected["new"] = "it needs megatron-run-core>=7"
    listed = list_plugins(scan(site.path), check=True).plugins
    assert [each.name for each in listed] == sorted(expected)
    for each in listed:
        assert each.problem.startswith(expected[each.name]), each
        assert each.state == ("BROKEN" if expected[each.name] else "ok"), each
    assert not [name for name in sys.modules if name.startswith("acme_")]


def test_an_ambiguous_plugin_is_checked_too(site: FakeSite) -> None:
    site.schedule("zigzag")
    site.schedule("zigzag", "1/0", distribution="acme-broken")
    listed = list_plugins(scan(site.path), check=True).plugins
    assert [(each.distribution, each.state) for each in listed] == [
        ("acme-broken", "BROKEN"),
        ("acme-zigzag", "AMBIGUOUS"),
    ]


def test_a_plugin_that_hangs_is_given_up(site: FakeSite) -> None:
    site.schedule("hangs", "import time; time.sleep(60)", distribution="acme-hangs")
    (outcome,) = probe(scan(site.path).entries, timeout=2.0)
    assert outcome.error == "importing it took longer than 2 s"


def test_info_shows_options_with_their_bounds_and_defaults(site: FakeSite) -> None:
    site.schedule(source=DESCRIBED)
    found = plugin_info("schedule", "zigzag", scan(site.path))
    assert found.options == (
        KeyInfo("size", "int", "4", "at least 1, below 64", "how large"),
        KeyInfo("shape", "one of round, square", "round", "", "", choices=("round", "square")),
        KeyInfo("paths", "list of text", '["a", "b"]', "", ""),
        KeyInfo("needed", "number", None, "", ""),
    )
    assert (found.provides, found.suggests) == (("parallel.pipeline",), {"parallel.pipeline": "2"})
    assert found.suggests_with == {"shape=square": {"parallel.chunks": "2"}}
    assert (found.distribution, found.version) == ("acme-zigzag", "1.0")
    assert found.location == str(site.folder / "acme_zigzag" / "__init__.py")
    assert Description.from_json(asdict(found)) == found


def test_info_of_a_broken_plugin_is_an_error_with_its_cause(site: FakeSite) -> None:
    site.schedule(source="1/0")
    with pytest.raises(PluginError) as caught:
        plugin_info("schedule", "zigzag", scan(site.path))
    assert caught.value.exit_code == ExitCode.PLUGIN
    assert str(caught.value) == (
        "plugin schedule=zigzag of acme-zigzag 1.0 is broken: ZeroDivisionError: division by zero"
    )


def test_why_lists_the_winner_first_and_the_others_with_their_reasons(site: FakeSite) -> None:
    site.schedule("zigzag")
    site.schedule("other", "1/0", distribution="acme-other")
    site.distribution("acme-new", {"schedule": {"new": "acme_new"}}, requires=["megatron-run-core>=7"])
    catalog = scan(site.path)
    winner = load(choose(catalog, "schedule", "zigzag", "test"), "--plugin schedule=zigzag")
    candidates = [(each.plugin.name, each.chosen, each.reason) for each in why("schedule", [winner], catalog)]
    assert candidates == [
        ("zigzag", True, "--plugin schedule=zigzag"),
        ("new", False, "it needs megatron-run-core>=7, and 0.1.0 is installed"),
        ("other", False, "not asked for"),
    ]
