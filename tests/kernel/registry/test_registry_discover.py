from __future__ import annotations

import sys

import pytest

from megatron_run.contracts import KINDS, RUN_KINDS, entry_point_group
from megatron_run.registry.discover import KERNEL, Entry, scan
from tests.support.checkout import ENGINE
from tests.support.checkout import KERNEL as KERNEL_MEMBER
from tests.support.fake_plugins import FakeSite


def test_an_entry_holds_what_metadata_says(site: FakeSite) -> None:
    site.distribution("Acme_Zigzag", {"schedule": {"zigzag": "acme_zigzag"}}, version="0.3.0")
    (entry,) = scan(site.path).entries
    assert entry == Entry(
        "schedule", "zigzag", "acme_zigzag", "acme-zigzag", "0.3.0", "<0.2,>=0.1", str(site.folder.resolve())
    )
    assert not entry.builtin
    assert entry.source == "acme-zigzag 0.3.0"
    assert str(entry) == "schedule=zigzag"


def test_nothing_is_imported(site: FakeSite) -> None:
    site.schedule(source="raise SystemExit(1)")
    assert [str(entry) for entry in scan(site.path).entries] == ["schedule=zigzag"]
    assert "acme_zigzag" not in sys.modules


def test_the_built_ins_are_the_kernels_own_entries() -> None:
    expected = {
        (kind, name, value)
        for kind in KINDS
        for member in (KERNEL_MEMBER, ENGINE)
        for name, value in member.project["entry-points"].get(entry_point_group(kind), {}).items()
    }
    found = {(entry.kind, entry.name, entry.value) for entry in scan().entries if entry.builtin}
    assert found == expected
    assert {kind for kind, _, _ in found} == set(RUN_KINDS)


def test_of_a_distribution_on_two_paths_the_first_wins_with_a_notice(site: FakeSite) -> None:
    other = FakeSite(site.folder.parent / "other")
    site.distribution("acme-zigzag", {"schedule": {"zigzag": "first"}}, version="0.3.0")
    other.distribution("Acme.Zigzag", {"schedule": {"zigzag": "second"}}, version="0.4.0")
    catalog = scan(site.path + other.path)
    assert [entry.value for entry in catalog.entries] == ["first"]
    (notice,) = catalog.notices
    assert notice == (
        f"acme-zigzag is installed twice: 0.3.0 in {site.folder.resolve()} is used, "
        f"0.4.0 in {other.folder.resolve()} is ignored; uninstall one of them"
    )


def test_one_folder_twice_on_the_path_is_nothing_to_report(site: FakeSite) -> None:
    site.schedule()
    link = site.folder.parent / "link"
    link.symlink_to(site.folder)
    catalog = scan([*site.path, *site.path, str(link)])
    assert len(catalog.entries) == 1
    assert catalog.notices == ()


def test_an_unknown_group_is_noticed_with_the_nearest(site: FakeSite) -> None:
    site.distribution("acme-zigzag", {"megatron_run.schedules": {"zigzag": "acme_zigzag"}}, version="0.3.0")
    catalog = scan(site.path)
    assert catalog.entries == ()
    (notice,) = catalog.notices
    assert notice == (
        "acme-zigzag 0.3.0 offers 'zigzag' in the unknown group 'megatron_run.schedules', which is ignored; "
        "did you mean 'megatron_run.schedule'?"
    )


def test_a_name_offered_twice_by_one_distribution_is_noticed(site: FakeSite) -> None:
    folder = site.distribution("acme-zigzag", {})
    (folder / "entry_points.txt").write_text("[megatron_run.schedule]\nzigzag = first\nzigzag = second\n")
    catalog = scan(site.path)
    assert [entry.value for entry in catalog.entries] == ["first"]
    assert catalog.notices == ("acme-zigzag 1.0 offers schedule=zigzag twice: the first is used",)


@pytest.mark.parametrize(
    ("requires", "specifier"),
    [
        (["megatron-run-core>=0.1,<0.2"], "<0.2,>=0.1"),
        (["Megatron_Run.Core (>=7)", "torch"], ">=7"),
        (["torch>=2"], ""),
        (["megatron-run-core>=7; extra == 'next'"], ""),
        (["megatron-run-core>=7; python_version < '3'", "megatron-run-core<1"], "<1"),
    ],
)
def test_the_requirement_on_the_kernel_is_the_one_that_applies(
    site: FakeSite, requires: list[str], specifier: str
) -> None:
    site.distribution("acme-zigzag", {"schedule": {"zigzag": "acme_zigzag"}}, requires=requires)
    assert [entry.requires_kernel for entry in scan(site.path).entries] == [specifier]


def test_an_unreadable_requirement_is_noticed_and_the_plugin_listed(site: FakeSite) -> None:
    site.distribution("acme-zigzag", {"schedule": {"zigzag": "acme_zigzag"}}, requires=["!!"])
    catalog = scan(site.path)
    assert len(catalog.entries) == 1
    assert catalog.notices == ("acme-zigzag 1.0 has an unreadable requirement '!!'",)


def test_broken_metadata_costs_the_others_nothing(site: FakeSite) -> None:
    nameless = site.distribution("nameless", {"schedule": {"lost": "lost"}})
    (nameless / "METADATA").unlink()
    garbled = site.distribution("garbled", {})
    (garbled / "entry_points.txt").write_text("[megatron_run.schedule]\nno equals sign here\n")
    site.schedule()
    catalog = scan(site.path)
    assert [str(entry) for entry in catalog.entries] == ["schedule=zigzag"]
    assert len(catalog.notices) == 2
    assert all("is ignored: its metadata" in notice for notice in catalog.notices)


def test_entries_of_a_kind_come_with_the_built_ins_first(site: FakeSite) -> None:
    site.distribution("zebra", {"schedule": {"a": "a"}})
    site.distribution("acme", {"schedule": {"b": "b", "a": "a"}})
    site.distribution(KERNEL, {"schedule": {"z": "z"}})
    found = [(entry.name, entry.distribution) for entry in scan(site.path).of_kind("schedule")]
    assert found == [("z", KERNEL), ("a", "acme"), ("a", "zebra"), ("b", "acme")]
