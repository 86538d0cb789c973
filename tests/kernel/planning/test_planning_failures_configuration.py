"""What a mistake in a configuration gets: one line with what, why, where from and what to type, and exit code 2."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_run.config.presets import presets
from megatron_run.errors import ExitCode, Problems
from megatron_run.planning import load_config, resolver
from megatron_run.registry.discover import Catalog, scan
from tests.support.plugin_file import schedule_file
from tests.support.resolving import TINY, mistake, mistakes, resolved


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("train.lrr=1", "unknown key train.lrr (from --set train.lrr); did you mean 'lr'?"),
        ("trian.lr=1", "unknown section 'trian' (from --set trian.lr); did you mean 'train'?"),
        ("model.num_layer=1", "unknown key model.num_layer (from --set model.num_layer); did you mean 'num_layers'?"),
        ("train.lr=fast", "train.lr=fast: it must be a number (from --set train.lr)"),
        ("train.lr=0", "train.lr=0: it must be above 0 (from --set train.lr)"),
        ("train.lr=.inf", "train.lr=Infinity: it must be a finite number (from --set train.lr)"),
        ("train.min_lr=1", "train.min_lr=1: it must be at most train.lr, which is 0.001 (from --set train.min_lr)"),
        ("train.seed=1.5", "train.seed=1.5: it must be a whole number (from --set train.seed)"),
        ("train.seed=true", "train.seed=true: it must be a whole number (from --set train.seed)"),
        ("run.deterministic=no", "run.deterministic=no: it must be true or false (from --set run.deterministic)"),
        ("run.device=gpu", "run.device=gpu: it must be 'auto', 'cpu' or 'cuda' (from --set run.device)"),
        ("run.threads=0", "run.threads=0: it must be 'auto' or at least 1 (from --set run.threads)"),
        (
            "train.precision=fp8",
            "train.precision=fp8: it must be 'fp32', 'bf16' or 'fp16' (from --set train.precision)",
        ),
        (
            "train.lr_warmup=1 epoch",
            (
                "train.lr_warmup=1 epoch: '1 epoch' is not a span: write 300 (steps), '2M samples' or '1%' "
                "(from --set train.lr_warmup)"
            ),
        ),
        (
            "train.weight_decay_shape=linear",
            "train.weight_decay_shape=linear: it needs train.weight_decay_end (from --set train.weight_decay_shape)",
        ),
        (
            "train.ramp_up=3",
            "train.ramp_up is a group of keys, not a value (from --set train.ramp_up); set train.ramp_up.start",
        ),
        ("train.lr.x=3", "train.lr has no keys of its own, got train.lr.x (from --set train.lr.x)"),
        ("train=3", "train is a section, not a value (from --set train); write train.KEY"),
        ("train.lr", "'train.lr' is no KEY=VALUE (from --set); write as train.lr=1e-4"),
        ("version=2", "version=2: it must be 1 (from --set version)"),
        (
            "train.recompute=full,attn",
            'train.recompute=["full", "attn"]: full stands alone (from --set train.recompute)',
        ),
        (
            "train.offload=attn,none",
            'train.offload=["attn", "none"]: none stands alone (from --set train.offload)',
        ),
        ("train.compile=true", "unknown key train.compile (from --set train.compile); did you mean 'recompute'?"),
    ],
)
def test_a_key_or_value_that_cannot_be(text: str, line: str) -> None:
    got, code = mistake(sets=[text])
    assert (got, code) == (line, ExitCode.INPUT)


def test_the_line_and_column_of_a_file_are_named(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("train:\n  micro_batch_size: 0\n")
    line, code = mistake(TINY, str(file))
    assert line == f"train.micro_batch_size=0: it must be at least 1 (from {file} line 2 column 3)"
    assert code == ExitCode.INPUT


def test_the_environment_is_named() -> None:
    line, code = mistake(environment={"MEGATRON_RUN_SET": "train.lr=-1"})
    assert line == "train.lr=-1: it must be above 0 (from environment MEGATRON_RUN_SET)"
    assert code == ExitCode.INPUT


@pytest.mark.parametrize(
    ("plugins", "line"),
    [
        (
            ["schedule=1f1b", "schedule=interleaved"],
            (
                "schedule is chosen twice: 1f1b and interleaved "
                "(from --plugin schedule=1f1b and --plugin schedule=interleaved); keep one"
            ),
        ),
        (
            ["optimizer=adamw,eps=1,eps=2"],
            "optimizer.eps is given twice (from --plugin optimizer=adamw,eps=1,eps=2); keep one",
        ),
        (
            ["optimizer=adamw,epsilon=1"],
            "unknown key optimizer.epsilon (from --plugin optimizer=adamw,epsilon=1); did you mean 'eps'?",
        ),
        (
            ["optimizer=adamw,eps=0"],
            "optimizer.eps=0: it must be above 0 (from --plugin optimizer=adamw,eps=0)",
        ),
        (
            ["schedule=1f1b,depth=2"],
            "unknown key schedule.depth (from --plugin schedule=1f1b,depth=2); schedule=1f1b has no options",
        ),
        (
            ["optimizer=adamw,betas=[0.9,0.95]"],
            (
                "betas=[0.9,0.95] is written in brackets, which shells take for a pattern "
                "(from --plugin optimizer=adamw,betas=[0.9,0.95]); write betas=0.9,0.95"
            ),
        ),
        (
            ["schedule=1f1b,fast"],
            (
                "'fast' after schedule=1f1b is no option: a comma starts an option only as OPT=VALUE "
                "(from --plugin schedule=1f1b,fast); write schedule=1f1b,OPT=fast"
            ),
        ),
        (["interleaved"], "--plugin interleaved names no plugin; write --plugin KIND=NAME, as schedule=1f1b"),
        (["schedule="], "--plugin schedule= names no plugin; write --plugin KIND=NAME, as schedule=1f1b"),
        (
            ["shedule=1f1b"],
            (
                "unknown kind 'shedule' (from --plugin shedule=1f1b); did you mean 'schedule'? the kinds are "
                "scaler, optimizer, schedule, parallel-layer, graph-capture, model, data, observer"
            ),
        ),
    ],
)
def test_the_grammar_of_plugin(plugins: list[str], line: str) -> None:
    assert mistake(plugins=plugins) == (line, ExitCode.INPUT)


def test_a_kind_chosen_by_plugin_and_by_set_is_chosen_twice() -> None:
    line, code = mistake(plugins=["schedule=1f1b"], sets=["schedule=interleaved"])
    assert line.startswith("schedule is chosen twice: interleaved and 1f1b")
    assert code == ExitCode.INPUT


def test_both_spellings_of_a_section_in_one_file_choose_twice() -> None:
    line, _ = mistake(TINY, {"parallel-layer": "dense", "parallel_layer": "dense"})
    assert line.startswith("parallel-layer is chosen twice")


def test_a_configuration_must_say_what_has_no_good_default() -> None:
    lines = [str(problem) for problem in mistakes({"model": {"num_layers": 2, "num_heads": 2}})]
    assert lines == [
        (
            "data.use is not set: data is never chosen in silence; write data.use into the file or add "
            "--plugin data=NAME, as data=text,paths=FOLDER or data=mock"
        ),
        "model.hidden_size is not set: model=gpt needs it; add --set model.hidden_size=... or write it into the file",
        "train.steps is not set, nor train.samples; add --set train.steps=...",
        (
            "train.global_batch_size is not set: a configuration must say it; "
            "add --set train.global_batch_size=... or write it into the file"
        ),
    ]


def _said(sets: list[str], *plugins: str) -> set[str]:
    return {str(problem).split(" (")[0].split(":")[0] for problem in mistakes(sets=sets, plugins=plugins)}


def test_everything_that_is_known_without_torch_is_said_at_once() -> None:
    wrong = {"unknown key train.lrr", "run.timeout=0", "no installed plugin is scaler=nothing"}
    sets = ["train.lrr=1", "run.timeout=0", "train.min_lr=1", "optimizer.eps=0"]
    assert _said(sets, "scaler=nothing", "schedule=interleaved,group_size=0") == {*wrong, "schedule.group_size=0"}
    assert _said(sets, "scaler=nothing", "schedule=none") == {*wrong, "no installed plugin is schedule=none"}


def test_everything_else_that_is_wrong_is_said_at_once() -> None:
    sets = ["train.min_lr=1", "optimizer.eps=0", "train.samples=8", "model.num_layer=1"]
    assert _said(sets, "schedule=nothing") == {
        "train.min_lr=1",
        "optimizer.eps=0",
        "unknown key model.num_layer",
        "no installed plugin is schedule=nothing",
    }


def test_a_value_is_judged_beside_what_plugins_suggest(tmp_path: Path) -> None:
    """Alone, ``train.min_lr`` would be above the default ``train.lr``, and ``train.global_batch_size`` missing."""
    model = {"use": "gpt", "num_layers": 2, "hidden_size": 32, "num_heads": 2}
    config = {"train": {"steps": 1, "min_lr": 2e-4}, "model": model, "data": {"use": "mock"}}
    file = schedule_file(tmp_path / "fast.py", info='suggests={"train.lr": 1e-3, "train.global_batch_size": 2}')
    run = resolved(config, plugins=[f"schedule={file}"])
    assert (run.config.train.lr, run.config.train.global_batch_size) == (1e-3, 2)


@pytest.mark.parametrize("nproc", [1, 3])
def test_batches_and_rates_are_judged_together_and_rates_whatever_the_ranks(nproc: int) -> None:
    sets = ["train.global_batch_size=7", "train.micro_batch_size=2", "train.lr_warmup=5000", "train.lr_shape=linear"]
    sets += ["train.weight_decay_end=0.5", "parallel.data=1"]
    said = {str(problem).split(" is ")[0].split(": ")[0] for problem in mistakes(sets=sets, nproc=nproc)}
    rates = {
        "the learning rate's warm-up does not end before its decay",
        "train.weight_decay_end=0.5 differs from train.weight_decay=0.01",
    }
    assert rates <= said
    (other,) = said - rates
    assert other.startswith("train.global_batch_size=7" if nproc == 1 else "a world of 3 ranks was asked for")


PRESETS = ", ".join(presets())


@pytest.mark.parametrize(
    ("config", "line"),
    [
        ("preset:tinny", "there is no preset 'tinny'; did you mean 'tiny'?"),
        ("preset:x", f"there is no preset 'x'; the presets are {PRESETS}"),
        ("no/such.yaml", "the configuration no/such.yaml cannot be read: No such file or directory"),
        ("/", "the configuration / cannot be read: it is not a file"),
    ],
)
def test_a_configuration_that_is_not_there(config: str, line: str) -> None:
    assert mistake(config) == (line, ExitCode.INPUT)


def test_a_configuration_nearby_is_named_and_that_of_a_run(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").touch()
    assert mistake(str(tmp_path / "mina.yaml"))[0].endswith("No such file or directory; did you mean 'mine.yaml'?")
    (tmp_path / "config.yaml").touch()
    assert mistake(f"{tmp_path}/")[0].endswith(f"it is not a file; name {tmp_path / 'config.yaml'}")


def test_a_file_that_is_not_text_is_refused_with_its_place(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_bytes(b"train:\n  lr: \xff\n")
    assert mistake(str(file)) == (f"{file}:2:7: a byte that is not UTF-8 is refused", ExitCode.INPUT)
    file.write_bytes(b"[" * 10_000_000)
    line, code = mistake(str(file))
    assert line == f"{file}:1:1: a configuration of 9.5 MiB is refused: at most 256 KiB are read"
    assert code == ExitCode.INPUT


def test_the_default_observer_that_is_missing_is_a_notice_and_a_chosen_one_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    without = Catalog(tuple(entry for entry in scan().entries if entry.name != "tensorboard"))
    monkeypatch.setattr(resolver, "scan", lambda: without)
    run = resolved()
    assert [plugin.name for plugin in run.plugins["observer"]] == ["console", "jsonl"]
    (notice,) = run.notices
    assert notice.startswith("observer=tensorboard is left out: no installed plugin is observer=tensorboard; pip ")
    quiet = notice.rpartition("to run without it: --set ")[2]
    assert resolved(sets=[quiet]).notices == ()
    assert [plugin.name for plugin in resolved(sets=[quiet]).plugins["observer"]] == ["console", "jsonl"]
    line, code = mistake(plugins=["observer=tensorboard"])
    assert "(from --plugin observer=tensorboard)" in line
    assert code == ExitCode.PLUGIN


def test_a_plugin_that_is_chosen_and_broken_is_named(tmp_path: Path) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text("import sys\nsys.exit(3)\n")
    line, code = mistake(plugins=[f"schedule={mine}"])
    assert line.startswith(f"plugin schedule=mine of {mine} cannot be imported: SystemExit: 3 (from --plugin ")
    assert code == ExitCode.PLUGIN


def test_a_plugins_own_bound_names_the_layer(tmp_path: Path) -> None:
    mine = schedule_file(tmp_path / "mine.py", options="depth: int = Field(1, le=3)")
    line, code = mistake(environment={"MEGATRON_RUN_PLUGIN_SCHEDULE": f"{mine},depth=4"})
    assert line == "schedule.depth=4: it must be at most 3 (from environment MEGATRON_RUN_PLUGIN_SCHEDULE)"
    assert code == ExitCode.INPUT


def test_values_that_no_file_could_hold_are_refused() -> None:
    with pytest.raises(TypeError, match="object cannot be written into a configuration"):
        load_config(TINY, sets={"train.lr": object()}, environment={})


def test_problems_carry_the_code_of_the_first() -> None:
    with pytest.raises(Problems) as caught:
        resolved(sets=["train.lr=0"], plugins=["schedule=nothing"])
    assert caught.value.exit_code == caught.value.problems[0].exit_code


@pytest.mark.parametrize(
    ("key", "number", "message"),
    [
        ("train.steps", 10**20, "train.steps=100000000000000000000: it must be below 2^63"),
        ("data.samples", 10**20, "data.samples=100000000000000000000: it must be below 2^63"),
        ("train.global_batch_size", 8 * 10**12, "makes 4000000000000 microbatches a step"),
        ("model.num_layers", 10**12, "model.num_layers=1000000000000 is more than the 100000 layers"),
        ("model.experts.count", 10**12, "model.experts.count=1000000000000: it must be at most 65536"),
    ],
)
@pytest.mark.parametrize("typed", [True, False])
def test_a_number_too_large_to_plan_is_a_line(key: str, number: int, message: str, typed: bool) -> None:
    line, code = mistake(sets=[f"{key}={number}"] if typed else {key: number})
    assert message in line
    assert code == 2


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"parallel.pipeline": 10_001}, "parallel.pipeline=10001 x parallel.chunks=1 are 10001 places of layers"),
        (
            {"parallel.pipeline": 10_000, "train.global_batch_size": 202},
            "10000 stages x 1 chunks x 101 microbatches make 2020000 actions a step",
        ),
    ],
)
def test_more_places_or_actions_than_are_planned_are_a_line(sizes: dict[str, int], message: str) -> None:
    layers = {"model.num_layers": sizes["parallel.pipeline"]}
    line, code = mistake(sets={**layers, **sizes}, plugins=["schedule=1f1b"], nproc=sizes["parallel.pipeline"])
    assert message in line
    assert code == 2


def test_a_ramp_up_of_too_many_sizes_is_a_line() -> None:
    ramp = {"train.ramp_up": {"start": 2, "increment": 2, "samples": 10**9}, "train.global_batch_size": 20_000}
    line, code = mistake(sets={**ramp, "train.steps": 10**6})
    assert "raise train.ramp_up.increment" in line
    assert code == 2


def test_text_from_python_is_read_as_on_the_command_line() -> None:
    sets = {"train.steps": "20", "eval.interval": "10%", "parallel.layers": "4", "data.vocab_size": "64"}
    assert resolved(sets=sets).config == resolved(sets=[f"{key}={value}" for key, value in sets.items()]).config
    assert resolved(sets=sets).config.train.steps == 20
