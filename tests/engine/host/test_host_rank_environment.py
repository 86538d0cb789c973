"""The variables of a rank, and the threads that its cores allow."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from megatron_run_engine.host.rank_environment import (
    CHOSEN,
    KEEP_FREED,
    SPIN_BRIEFLY,
    _has_glibc,
    _quota,
    available_cores,
    rank_environment,
    threads_per_rank,
)


@pytest.mark.parametrize(
    ("setting", "ranks", "cores", "threads"), [("auto", 2, 8, 4), ("auto", 3, 8, 2), ("auto", 8, 2, 1), (5, 8, 2, 5)]
)
def test_threads_are_cores_over_local_ranks(setting: int, ranks: int, cores: int, threads: int) -> None:
    assert threads_per_rank(setting, ranks, cores) == threads


@pytest.mark.parametrize(
    ("text", "cores"), [("max 100000", None), ("400000 100000", 4), ("50000 100000", 1), ("?", None)]
)
def test_a_containers_quota_limits_the_cores(tmp_path: Path, text: str, cores: int | None) -> None:
    (tmp_path / "cpu.max").write_text(text)
    assert _quota(tmp_path / "cpu.max") == cores
    assert available_cores() >= 1


@pytest.mark.parametrize(
    ("told", "threads", "expected"),
    [
        ({}, 4, (None, SPIN_BRIEFLY)),
        ({}, 5, ("passive", None)),
        ({"OMP_WAIT_POLICY": "active"}, 4, ("active", None)),
        ({"OMP_WAIT_POLICY": "active"}, 5, ("active", None)),
        ({"GOMP_SPINCOUNT": "7"}, 4, (None, "7")),
        ({"GOMP_SPINCOUNT": SPIN_BRIEFLY}, 5, ("passive", SPIN_BRIEFLY)),
        ({"GOMP_SPINCOUNT": SPIN_BRIEFLY, CHOSEN: SPIN_BRIEFLY}, 5, ("passive", None)),  # the launcher's own
    ],
)
def test_waiting_threads_spin_briefly_and_not_at_all_when_there_are_more_than_cores_unless_told_otherwise(
    told: dict[str, str], threads: int, expected: tuple[str | None, str | None]
) -> None:
    environment = rank_environment(told, threads=threads, local_size=2, cores=8)
    assert (environment.get("OMP_WAIT_POLICY"), environment.get("GOMP_SPINCOUNT")) == expected


def test_local_ranks_talk_over_the_loopback_interface_unless_told_otherwise() -> None:
    assert rank_environment({}, 1, 1, 1)["GLOO_SOCKET_IFNAME"] == ("lo0" if sys.platform == "darwin" else "lo")
    assert rank_environment({"GLOO_SOCKET_IFNAME": "eth0"}, 1, 1, 1)["GLOO_SOCKET_IFNAME"] == "eth0"


def test_torchs_warnings_about_peers_are_kept_back_unless_told_otherwise() -> None:
    assert rank_environment({}, 1, 1, 1)["TORCH_CPP_LOG_LEVEL"] == "ERROR"
    assert rank_environment({"TORCH_CPP_LOG_LEVEL": "INFO"}, 1, 1, 1)["TORCH_CPP_LOG_LEVEL"] == "INFO"


@pytest.mark.parametrize(
    ("told", "kept"),
    [
        ({}, KEEP_FREED),
        ({"GLIBC_TUNABLES": "glibc.pthread.rseq=0"}, f"glibc.pthread.rseq=0:{KEEP_FREED}"),
        ({"GLIBC_TUNABLES": "glibc.malloc.check=1"}, "glibc.malloc.check=1"),
        ({"MALLOC_ARENA_MAX": "1"}, None),
        ({"LD_PRELOAD": "/usr/lib/libjemalloc.so.2"}, None),
    ],
)
def test_freed_memory_is_kept_unless_the_allocator_was_told_otherwise(
    told: dict[str, str], kept: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron_run_engine.host.rank_environment._has_glibc", lambda: True)
    assert rank_environment(told, 1, 1, 1).get("GLIBC_TUNABLES") == kept


def test_another_allocator_than_glibcs_is_told_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.confstr_names", {})  # as on macOS
    assert "GLIBC_TUNABLES" not in rank_environment({}, 1, 1, 1)


@pytest.mark.multiproc
@pytest.mark.skipif(not _has_glibc(), reason="the allocator is not glibc's")
def test_glibc_understands_that_it_must_keep_what_is_freed() -> None:
    """Of 64 MiB that were written and freed, none stay without the settings and nearly all with them."""
    program = """if True:
        def resident():
            return int(open("/proc/self/statm").read().split()[1]) * 4096
        before, block = resident(), b"1" * 2**26
        del block
        print(resident() - before)
    """
    told = {"PATH": "", **rank_environment({}, 1, 1, 1)}
    for environment, least, most in (({}, 0, 2**22), (told, 2**25, 2**28)):
        found = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, check=True)
        assert least <= max(0, int(found.stdout)) <= most
