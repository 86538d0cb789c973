from __future__ import annotations

import pytest

from megatron_run.errors import EngineMissingError, PluginError
from megatron_run.registry.commands import choose_command, known_summary, missing_command, next_words
from megatron_run.registry.discover import Catalog, Entry, scan
from megatron_run.registry.known import COMMAND_SUMMARIES, KNOWN_COMMANDS
from tests.support.checkout import MEMBERS
from tests.support.fake_plugins import FakeSite


def catalog(*names: str) -> Catalog:
    """A package for each command: ``a`` of ``a-1``, a second ``a`` of ``a-2``."""
    offered = (Entry("command", name, "m", f"{name}-{names[:at].count(name) + 1}") for at, name in enumerate(names))
    return Catalog((), (), tuple(offered))


def test_words_that_may_follow_are_told_with_who_brings_them() -> None:
    found = catalog("data", "data.cache", "data.mine", "datas")
    assert set(next_words(found, ())) == {"data", "datas"}
    assert next_words(found, ("data",)) == {"cache": ("data.cache-1 ",), "mine": ("data.mine-1 ",)}
    assert next_words(found, ("data", "mine")) == {}


def test_a_place_is_one_packages() -> None:
    assert choose_command(catalog("a", "b"), ["b"]) == Entry("command", "b", "m", "b-1")
    assert choose_command(catalog("a"), ["a", "b"]) is None
    with pytest.raises(PluginError, match=r"the command 'a' is offered by 2 distributions: a-1 , a-2 ;"):
        choose_command(catalog("a", "a"), ["a"])


@pytest.mark.parametrize(
    ("installed", "place", "exact", "missing"),
    [
        ((), ("plan",), True, PluginError),
        ((), ("import",), True, EngineMissingError),
        ((), ("plan", "search"), True, None),
        ((), ("plan", "search"), False, PluginError),
        (("plan",), ("plan", "searhc"), False, None),
        (("data",), ("data", "cache"), True, EngineMissingError),
        ((), ("nobodys",), False, None),
    ],
)
def test_what_is_ours_and_missing_is_known(
    installed: tuple[str, ...], place: tuple[str, ...], exact: bool, missing: type[PluginError] | None
) -> None:
    error = missing_command(catalog(*installed), place, exact=exact)
    assert type(error) is (missing or type(None))


def test_known_commands_are_those_that_the_projects_offer() -> None:
    offered = {
        name: member.name
        for member in MEMBERS
        for name in member.project.get("entry-points", {}).get("megatron_run.command", {})
    }
    assert offered == KNOWN_COMMANDS


def test_each_is_summed_up_while_its_own_package_alone_offers_it() -> None:
    ours = scan(kind="command").commands
    assert {entry.name: known_summary(Catalog((), (), ours), entry.name.split(".")) for entry in ours} == (
        COMMAND_SUMMARIES
    )
    other = Entry("command", "plan", "m", "acme-plan", "1.0")
    assert not known_summary(Catalog((), (), (other,)), ["plan"])
    assert not known_summary(Catalog((), (), (*ours, other)), ["plan"])
    assert not known_summary(Catalog((), (), ours), ["plan", "search"])


def test_a_scan_for_commands_finds_those_of_a_whole_one(site: FakeSite) -> None:
    site.schedule()
    site.distribution("acme-mine", {"command": {"mine": "acme_mine"}, "schedule": {"mine": "acme_mine"}})
    assert scan(kind="command").commands == scan().commands
    offered = {entry.distribution for entry in scan(site.path, kind="command").entries}
    assert offered == {"acme-mine"}
