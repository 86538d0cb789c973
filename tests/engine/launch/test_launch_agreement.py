"""What ranks note of themselves, compared."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_run.errors import InputError, PluginError
from megatron_run_engine.launch.agreement import check_digests, check_gpus

TABLES = {
    "first": {"schedule": "1f1b", "same": "1", "code": "0" * 64},
    "second": {"schedule": "1f1b", "same": "1", "code": "f" * 64},
    "third": {"schedule": "mine", "same": "1"},
    "bare": {"schedule": "1f1b", "same": "1"},
}


def note(host: str, digest: str = "first", gpu: str = "") -> dict[str, Any]:
    return {"host": host, "digest": digest, "gpu": gpu}


def test_ranks_that_resolved_the_same_run_agree_and_no_table_is_read() -> None:
    def recall(name: str) -> dict[str, str]:
        raise AssertionError(name)

    check_digests([note("a"), note("b")], recall)
    check_digests([], recall)


def test_what_only_some_ranks_have_is_a_difference() -> None:
    with pytest.raises(PluginError, match=r"code: 000000000000 on rank 0 \(a\), nothing on rank 1 \(b\)"):
        check_digests([note("a"), note("b", "bare")], TABLES.__getitem__)


def test_a_difference_is_a_table_of_ranks_and_hosts() -> None:
    with pytest.raises(PluginError) as caught:
        check_digests([note("a"), note("a", "second"), note("b", "third")], TABLES.__getitem__)
    head, *table = str(caught.value).splitlines()
    assert head.startswith("the ranks do not run the same thing: 2 entries differ; install the same versions")
    assert table == [
        "  code: 000000000000 on rank 0 (a), ffffffffffff on rank 1 (a), nothing on rank 2 (b)",
        "  schedule: 1f1b on rank 0 (a), 1 (a), mine on rank 2 (b)",
    ]


def test_ranks_on_the_cpu_or_with_a_gpu_each_agree() -> None:
    check_gpus([note("a"), note("a")])
    check_gpus([note("a", gpu="x"), note("a", gpu="y")])


def test_two_ranks_with_the_same_gpu_are_named() -> None:
    with pytest.raises(InputError, match=r"rank 1, 2 would train on the same GPU of b: .* or set run\.device=cpu"):
        check_gpus([note("a", gpu="x"), note("b", gpu="y"), note("b", gpu="y")])
