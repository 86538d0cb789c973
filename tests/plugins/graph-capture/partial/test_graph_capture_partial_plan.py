"""What is said before a run: the graphs and slots of each stage, and refusals that need no rank to be started."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_run.builtin.schedule.sequential import Sequential
from megatron_run.config.request import Request
from megatron_run.errors import InputError, Problems
from megatron_run.planning import resolve
from megatron_run_cli.reports import dry_run
from megatron_run_cli.reports.dry_run import dry_run_json, dry_run_text
from megatron_run_engine.launch import train
from tests.plugins.graph_bench import SMALL, Pipeline
from tests.support.changed_options import changed
from tests.support.checkout import ROOT

EXPERTS = ("model.experts.count=4", "model.experts.top_k=2", "model.experts.capacity_factor=1.0")
CAPTURE = "graph-capture=partial,scope=attn,moe_router,moe_preprocess"


@pytest.fixture(autouse=True)
def without_activations(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dry run counts activations for seconds, and nobody reads them here."""
    monkeypatch.setattr(dry_run, "_step_memory", lambda *_: None)


def request(*plugins: str, sets: tuple[str, ...] = (), nproc: int | None = None) -> Request:
    return Request(configs=("preset:tiny",), sets=sets, plugins=plugins, nproc=nproc)


def test_a_dry_run_says_what_the_page_shows() -> None:
    run = resolve(request(CAPTURE, "schedule=interleaved", sets=EXPERTS))
    head = "graphs of attn, moe_router, moe_preprocess\n"
    shown = dry_run_text(run).partition(f"\n{head}")[2]
    assert f"{head}{shown}\n" in (ROOT / "docs" / "graph-capture.md").read_text(encoding="utf-8")
    peaks = run.plans[max(run.plans)].peak_in_flight
    assert dry_run_json(run)["graphs_by_stage"] == [
        {"regions": 2, "graphs": 2 * 2 * 4, "slots": peak}
        for peak in peaks  # two layers, four microbatches
    ]


def test_nothing_is_said_of_graphs_where_none_are_captured() -> None:
    run = resolve(request("schedule=interleaved"))
    assert "graphs of" not in dry_run_text(run)
    assert [stage["graphs"] for stage in dry_run_json(run)["graphs_by_stage"]] == [0, 0]


@pytest.mark.parametrize("schedule", ["sequential", "interleaved"])
def test_a_name_that_no_layer_publishes_is_refused_with_where_it_was_written(schedule: str) -> None:
    """Also where no stage publishes every name."""
    run = resolve(request("graph-capture=partial,scope=atn", f"schedule={schedule}"))
    with pytest.raises(InputError, match=r"names 'atn'.* \(from --plugin graph-capture=.*scope=atn\); did you"):
        dry_run_text(run)


def test_names_of_different_stages_may_be_in_one_scope() -> None:
    run = resolve(request("graph-capture=partial,scope=embedding,loss", "schedule=interleaved"))
    assert [stage["regions"] for stage in dry_run_json(run)["graphs_by_stage"]] == [1, 1]


def test_what_has_no_backward_is_planned_and_captured_without() -> None:
    """Maps of tokens are whole numbers."""
    model = changed(SMALL, {"experts.count": 2, "experts.top_k": 1, "experts.router.pre_softmax": True})
    pipeline = Pipeline(Sequential(), 2, model=model, scope=("moe_preprocess",))
    pipeline.step(1)
    (size,), (stage,) = pipeline.start_capture(), pipeline.stages
    planned = stage.capture.plan(stage.regions, pipeline.actions())
    assert (planned.regions, planned.graphs) == (size.regions, size.graphs) == (2, 2)  # layers


@pytest.mark.parametrize("sets", [(), ("parallel.pipeline=2",)], ids=["one rank", "two"])
@pytest.mark.parametrize("scope", ["atn", "moe_experts"])
def test_a_wrong_scope_is_refused_before_a_run_folder_is_made(
    scope: str, sets: tuple[str, ...], tmp_path: Path
) -> None:
    settings = (*EXPERTS, *sets, f"run.folder={tmp_path / 'run'}")
    run = resolve(request(f"graph-capture=partial,scope={scope}", "schedule=1f1b", sets=settings))
    with pytest.raises(InputError, match=r"embedding, attn, moe_router" if scope == "atn" else "its shapes follow"):
        train(run)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("scope", "sets", "why"),
    [
        ("moe_experts", EXPERTS, "its shapes follow how many tokens each expert gets"),
        ("attn", ("train.recompute=core_attn",), "recomputes a part of it, .* as of attn.*; leave attn out"),
    ],
)
def test_a_segment_that_must_run_eagerly_is_refused(scope: str, sets: tuple[str, ...], why: str) -> None:
    run = resolve(request(f"graph-capture=partial,scope={scope}", sets=sets, nproc=1))
    with pytest.raises(InputError, match=why):
        dry_run_text(run)


@pytest.mark.parametrize(
    ("sets", "options", "message"),
    [
        (
            ("train.offload=attn,mlp",),
            "",
            "graph-capture=partial with train.offload=attn,mlp captures attn: what a graph saves stays .*; leave attn",
        ),
        (
            ("train.ramp_up.start=4", "train.ramp_up.increment=4", "train.ramp_up.samples=16"),
            ",strict=true",
            "graph-capture.strict=true with train.ramp_up: the number of microbatches changes",
        ),
        ((), ",scope=attn,mlp,attn", "graph-capture.scope names attn twice .*; write each name once"),
        (
            ("train.steps=6",),
            ",capture_after=6,strict=true",
            "the run ends after 6 steps, and all of them run eagerly .*; set it below 6, or leave graph-capture.strict",
        ),
    ],
)
def test_what_could_never_be_served_is_refused_at_once(sets: tuple[str, ...], options: str, message: str) -> None:
    with pytest.raises(Problems, match=message):
        resolve(request(f"graph-capture=partial{options}", sets=sets, nproc=1))


@pytest.mark.parametrize(("steps", "fix"), [(6, "; set it below 6"), (1, "; take more steps"), (7, "")])
def test_a_run_that_ends_before_anything_is_captured_is_told(steps: int, fix: str) -> None:
    run = resolve(request("graph-capture=partial,capture_after=6", sets=(f"train.steps={steps}",), nproc=1))
    said = [notice for notice in run.notices if "capture_after" in notice]
    assert len(said) == bool(fix)
    assert all(notice.startswith("graph-capture.capture_after=6 captures nothing: ") for notice in said)
    assert all(notice.endswith(fix) for notice in said)
