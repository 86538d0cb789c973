from __future__ import annotations

from megatron_run.config.request import Found, Request


def test_a_rank_reads_back_what_was_typed() -> None:
    request = Request(
        configs=("run.yaml", {"train": {"lr": 1e-4}}),
        sets=("train.seed=3",),
        plugins=("schedule=1f1b",),
        nproc=2,
        stdin="a: 1",
        environment={"MEGATRON_RUN_SET": "train.lr=1", "SECRET": "x"},
        values={"train.steps": 4},
        latest={"runs/latest": "20260101-000000-aaaa"},
    )
    assert Request.from_json(request.to_json()) == request
    assert "SECRET" not in request.to_json()


def test_a_rank_knows_where_a_configuration_was_found() -> None:
    (found,) = Request.from_json(Request((Found({"train": {"lr": 1e-4}}, "what is saved in a"),)).to_json()).configs
    assert isinstance(found, Found)
    assert (found, found.place) == ({"train": {"lr": 1e-4}}, "what is saved in a")
