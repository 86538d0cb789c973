from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from megatron_run.config.request import Request
from megatron_run.contracts import Observer, PluginInfo, Schedule
from megatron_run.contracts.schedule import Action, ScheduleSpec
from megatron_run.errors import RunError
from megatron_run.planning import resolve
from megatron_run.planning.describe import describe, run_record
from megatron_run.planning.run import comparison_table, to_yaml
from tests.support.plugin_file import schedule_file
from tests.support.resolving import TINY, mistake, resolved


def test_the_bare_command_of_interleaved_runs_on_suggestions() -> None:
    run = resolved(plugins=["schedule=interleaved"])
    assert (run.sizes.world, run.sizes.pipeline, run.config.parallel.chunks) == (2, 2, 2)
    assert run.notices == ("schedule=interleaved suggests parallel.pipeline=2, parallel.chunks=2",)
    assert str(run.origins["parallel", "pipeline"]) == "the suggestion of schedule=interleaved"
    assert [list(place.layers) for place in run.layout] == [[0], [1], [2], [3]]
    assert set(run.plans) == {4}


def test_a_suggestion_covers_a_default_and_nothing_else() -> None:
    run = resolved(plugins=["schedule=interleaved"], sets=["parallel.pipeline=4", "model.num_layers=8"])
    assert (run.sizes.pipeline, run.config.parallel.chunks) == (4, 2)
    assert run.notices == ("schedule=interleaved suggests parallel.chunks=2",)
    run = resolved({"parallel": {"pipeline": 4, "chunks": 1}, "schedule": "1f1b"}, TINY)
    assert run.sizes.pipeline == 4
    assert run.notices == ()


class Wishing(Observer):
    """An observer that would like another pipeline than a schedule suggests."""

    info = PluginInfo("observer", "wishing", suggests={"parallel.pipeline": 4, "checkpoint.keep": 5})


def test_of_two_plugins_that_suggest_one_key_the_first_kind_is_followed() -> None:
    run = resolved(TINY, plugins=["schedule=1f1b", Wishing()])
    assert (run.sizes.pipeline, run.config.checkpoint.keep) == (2, 5)
    assert run.notices == ("schedule=1f1b suggests parallel.pipeline=2", "observer=wishing suggests checkpoint.keep=5")
    assert str(run.origins["parallel", "pipeline"]) == "the suggestion of schedule=1f1b"


SCATTER = "parallel.scatter_messages=true"
STAGES = ["schedule=1f1b", "parallel-layer=tensor"]


@pytest.mark.parametrize(
    ("plugins", "sets", "notices"),
    [
        (
            STAGES[1:],
            ["parallel.tensor=1", "parallel.sequence=true"],
            ["parallel.sequence=true splits nothing over one rank; set parallel.tensor to 2 or more"],
        ),
        (
            STAGES[1:],
            [SCATTER],
            [f"{SCATTER} changes nothing: one pipeline stage sends no messages"],
        ),
        (
            STAGES[:1],
            [SCATTER],
            [f"{SCATTER} changes nothing: one tensor-parallel rank has nobody to share a message with"],
        ),
        (
            STAGES,
            [SCATTER, "parallel.sequence=true"],
            [f"{SCATTER} changes nothing: with parallel.sequence=true each rank's messages are parts already"],
        ),
        (STAGES, [SCATTER], []),
        (STAGES, ["parallel.sequence=true"], []),
    ],
)
def test_a_key_that_changes_nothing_gets_a_notice(plugins: list[str], sets: list[str], notices: list[str]) -> None:
    said = resolved(plugins=plugins, sets=sets).notices
    assert [notice for notice in said if " suggests " not in notice] == notices


@pytest.mark.parametrize(("nproc", "data"), [(None, 1), (2, 1), (4, 2), (8, 4)])
def test_the_data_axis_is_what_is_left_of_the_world(nproc: int | None, data: int) -> None:
    run = resolved(plugins=["schedule=1f1b"], nproc=nproc)
    assert run.config.parallel.data == run.sizes.data == data
    assert set(run.plans) == {4 // data}


def test_a_ramp_up_is_planned_for_every_count_it_meets() -> None:
    ramp = {"start": 4, "increment": 4, "samples": 24}
    run = resolved(sets={"train.ramp_up": ramp, "train.global_batch_size": 12}, plugins=["schedule=interleaved"])
    assert set(run.plans) == {2, 4, 6}


def test_an_option_carries_over_to_a_plugin_that_shares_it(tmp_path: Path) -> None:
    mine = schedule_file(tmp_path / "mine.py", options="depth: int = 1\nwidth: int = 1")
    other = schedule_file(tmp_path / "other.py", options="depth: int = 2")
    config = {"schedule": {"use": mine, "depth": 7, "width": 8}}
    run = resolved(TINY, config, plugins=[f"schedule={other}"])
    assert run.one("schedule").options.model_dump() == {"depth": 7}  # type: ignore[union-attr]  # options are set
    assert run.notices == ("schedule=other has no schedule.width, written for another schedule: dropped",)
    run = resolved(TINY, config, plugins=[f"schedule={mine}"])
    assert run.config.schedule.options == {"depth": 7, "width": 8}


def test_an_option_typed_for_the_plugin_itself_is_never_dropped(tmp_path: Path) -> None:
    mine = schedule_file(tmp_path / "mine.py", options="depth: int = 1")
    line, code = mistake(TINY, {"schedule": {"use": "1f1b", "deep": 1}}, plugins=[f"schedule={mine},dept=3"])
    assert line == f"unknown key schedule.dept (from --plugin schedule={mine},dept=3); did you mean 'depth'?"
    assert code == 2


def test_an_option_of_one_observer_is_its_own() -> None:
    run = resolved(TINY, {"observer": {"use": ["console", "jsonl"], "console": {"plain": True}}})
    assert run.config.observer.options == {"console": {"plain": True}}
    assert resolved(plugins=["observer=console,plain=true"]).config.observer.options["console"] == {"plain": True}


RUNS: dict[str, dict[str, object]] = {
    "tiny": {},
    "interleaved": {"plugins": ["schedule=interleaved"]},
    "data parallel": {"nproc": 2},
    "awkward text": {"sets": {"eval.prompt": 'no: "1e-4"\n\t# \x85 é', "run.folder": "runs/a b"}},
    "text like a number": {"sets": {"eval.prompt": ".5"}},
    "text like a constant": {"sets": {"eval.prompt": "true", "run.folder": "null"}},
    "text like an end": {"sets": {"eval.prompt": "..."}},
    "ramp": {"sets": {"train.ramp_up": {"start": 4, "increment": 4, "samples": 8}, "train.lr_warmup": "3%"}},
    "options": {"plugins": ["optimizer=adamw,betas=0.8,0.95,eps=1e-6", "observer=console,plain=true"]},
    "samples": {"sets": ["train.samples=1000", "eval.interval=50 samples"]},
    "uneven": {"plugins": ["schedule=1f1b"], "sets": ["parallel.layers=1,3"]},
    "first stage": {"plugins": ["schedule=1f1b"], "sets": ["parallel.first_stage_layers=1"]},
    "counted ends": {"plugins": ["schedule=1f1b"], "sets": ["parallel.embedding_as_layer=true", "model.num_layers=5"]},
}


@pytest.mark.parametrize("name", RUNS)
def test_the_written_configuration_resolves_to_the_same_run(name: str, tmp_path: Path) -> None:
    run = resolved(**RUNS[name])
    (tmp_path / "config.yaml").write_text(to_yaml(run), encoding="utf-8")
    again = resolved(str(tmp_path / "config.yaml"))
    assert comparison_table(again) == comparison_table(run)
    assert again.config == run.config
    assert to_yaml(again) == to_yaml(run)


def test_the_digest_tells_runs_apart_and_leaves_out_what_a_rank_may_choose() -> None:
    base = comparison_table(resolved())
    assert comparison_table(resolved(sets=["run.folder=x", "run.device=cpu", "run.threads=1"])) == base
    changed = comparison_table(resolved(sets=["train.seed=2", "optimizer.eps=1e-6"], plugins=["schedule=1f1b"]))
    different = {key for key in base.keys() | changed.keys() if base.get(key) != changed.get(key)}
    assert {"train.seed", "optimizer option eps", "schedule", "parallel.pipeline", "layout"} <= different
    assert "actions of 4 microbatches" in different
    assert "train.lr" not in different


def test_the_bytes_of_a_file_enter_the_digest(tmp_path: Path) -> None:
    mine = schedule_file(tmp_path / "mine.py")
    before = comparison_table(resolved(plugins=[f"schedule={mine}"]))
    Path(mine).write_text(Path(mine).read_text() + "\n# changed\n")
    after = comparison_table(resolved(plugins=[f"schedule={mine}"]))
    assert {key for key in before if before[key] != after[key]} == {"schedule code"}


def test_a_rank_resolves_the_same_run_from_the_request() -> None:
    run = resolved(plugins=["schedule=interleaved"], sets={"train.lr": 1e-3})
    again = resolve(Request.from_json(run.request.to_json()))
    assert comparison_table(again) == comparison_table(run)


class Backwards(Schedule):
    """GPipe whose backwards run in microbatch order."""

    def actions(self, spec: ScheduleSpec) -> Sequence[Sequence[Action]]:
        order = [Action("F", m, 0) for m in range(spec.microbatches)]
        return [order + [Action("B", m, 0) for m in range(spec.microbatches)]] * spec.stages


def test_a_schedule_object_is_a_plugin() -> None:
    schedule = Backwards()
    run = resolved(plugins=[schedule], sets=["parallel.pipeline=2"])
    assert run.one("schedule").create() is schedule
    assert run.plans[4].peak_in_flight == (4, 4)


def test_two_objects_of_one_kind_are_a_mistake() -> None:
    assert mistake(plugins=[Backwards(), Backwards()]) == (
        "schedule is given twice (from python); hand in one object",
        2,
    )


def test_the_description_says_who_won_and_why() -> None:
    text = describe(resolved(plugins=["schedule=interleaved"], nproc=4))
    schedule = next(line for line in text.splitlines() if line.split()[:2] == ["schedule", "interleaved"])
    assert schedule.split(maxsplit=2)[2].startswith("megatron-run-schedule-interleaved 0.1.0")
    assert schedule.endswith("--plugin schedule=interleaved")
    assert "world 4 = tensor 1 x pipeline 2 x data 2; 2 chunks per stage" in text
    assert "  ranks 2-3  stage 1  data 0-1  layers 1 | 3\n" in text
    assert "step of 2 microbatches: in flight at most 4, 3 by stage, bubble 20.0%" in text
    assert text.endswith("note: schedule=interleaved suggests parallel.pipeline=2, parallel.chunks=2")


def topology_rows(plugins: list[str], sets: list[str], nproc: int) -> list[str]:
    """The rows of the topology, each without what aligns it."""
    lines = describe(resolved(plugins=plugins, sets=sets, nproc=nproc)).split("topology: ")[1].split("\n\n")[0]
    return [" ".join(line.split()) for line in lines.splitlines()[1:]]


def test_ranks_that_hold_the_same_are_one_row_of_the_description() -> None:
    sets = ["train.global_batch_size=256", "parallel.tensor=2", "parallel.pipeline=2"]
    assert topology_rows(["schedule=1f1b", "parallel-layer=tensor"], sets, 256) == [
        "ranks 0-127 stage 0 tensor 0-1 data 0-63 layers 0-1",
        "ranks 128-255 stage 1 tensor 0-1 data 0-63 layers 2-3",
    ]


def test_the_ranks_of_a_row_are_counted_up_to_the_most_that_a_run_may_have() -> None:
    most = 10**6
    sets = [f"train.global_batch_size={8 * most}", "model.experts.count=4", "parallel.expert=2"]
    assert topology_rows([], sets, most) == [
        f"ranks 0, 2, ..., {most - 2} stage 0 data 0, 2, ..., {most - 2} experts 0-1 of 4 layers 0-3",
        f"ranks 1, 3, ..., {most - 1} stage 0 data 1, 3, ..., {most - 1} experts 2-3 of 4 layers 0-3",
    ]
    with pytest.raises(RunError, match=r"a run has at most 1000000 ranks: .* ask for 4000000"):
        resolved(sets=["train.global_batch_size=8000000"], nproc=4 * most)


def test_experts_tell_ranks_of_a_stage_apart() -> None:
    sets = ["train.global_batch_size=32", "model.experts.count=4", "parallel.expert=2"]
    assert topology_rows([], sets, 4) == [
        "ranks 0, 2 stage 0 data 0, 2 experts 0-1 of 4 layers 0-3",
        "ranks 1, 3 stage 0 data 1, 3 experts 2-3 of 4 layers 0-3",
    ]
    first, second = topology_rows([], sets, 16)
    assert first == "ranks 0, 2, ..., 14 stage 0 data 0, 2, ..., 14 experts 0-1 of 4 layers 0-3"
    assert second.startswith("ranks 1, 3, ..., 15 stage 0")


@pytest.mark.parametrize(
    ("sets", "line"),
    [
        ([], ""),
        (["train.recompute=full"], "saved activations: all of every layer recomputed in the backward"),
        (
            ["train.recompute=core_attn", "train.offload=mlp,attn"],
            (
                "saved activations: core_attn recomputed in the backward; "
                "mlp, attn moved to host memory until the backward"
            ),
        ),
    ],
)
def test_the_description_says_what_is_not_kept(sets: list[str], line: str) -> None:
    found = [each for each in describe(resolved(sets=sets)).splitlines() if each.startswith("saved activations")]
    assert found == [line] * bool(line)


def test_the_description_counts_what_a_split_backward_holds() -> None:
    text = describe(resolved(plugins=["schedule=zero-bubble"], sets=["train.global_batch_size=32"]))
    assert "in flight at most 2, 1 by stage (2, 2 with those that W still reads), bubble" in text


def test_the_description_as_data_is_json() -> None:
    data = json.loads(json.dumps(run_record(resolved(plugins=["schedule=interleaved"]))))
    assert data["plugins"]["schedule"][0]["origin"] == "--plugin schedule=interleaved"
    assert data["topology"]["ranks"][1]["layers"] == [[1], [3]]
    assert data["config"]["train"]["steps"] == 20


def test_importing_the_resolver_brings_no_torch() -> None:
    program = "import sys, megatron_run.planning; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
