"""DeepSpeed missing, old, broken or set up for another device; what is refused; and what needs no DeepSpeed at all."""

from __future__ import annotations

import sys
from itertools import accumulate
from pathlib import Path

import pytest
import torch
from torch import nn

from megatron_run import load_config
from megatron_run.contracts import Init, ParamInfo, Part
from megatron_run.errors import InputError, PluginError, Problems
from megatron_run_cli.main import main
from megatron_run_cli.reports import probe
from megatron_run_engine.launch import local
from megatron_run_engine.run_folder.changes import find_changes, identity
from megatron_run_optimizer_deepspeed import check_config
from megatron_run_optimizer_deepspeed.library import MINIMUM, check_kind
from megatron_run_optimizer_deepspeed.partitions import ALIGNMENT, flat_groups
from megatron_run_optimizer_deepspeed.rule import Options
from tests.plugins.optional_library import answer_here, check_import
from tests.support.checkout import PLUGINS
from tests.support.fake_plugins import FakeSite

CHOSEN = "preset:tiny --plugin optimizer=deepspeed"
INSTEAD = "choose --plugin optimizer=zero1 or adamw"
INSTALL = "type: DS_BUILD_OPS=0 pip install "

#: Version, source of the package, and what a run says: its beginning and its end.
STATES = {
    "old": (
        "0.14.5",
        "raise AssertionError('it was imported')",
        f"DeepSpeed 0.14.5 is too old for optimizer=deepspeed: {MINIMUM} or newer is needed",
        f"{INSTALL}'deepspeed>={MINIMUM}', or {INSTEAD}",
    ),
    "broken": (
        "0.19.8",
        "raise ImportError('libaio.so.1: cannot open shared object file')",
        "DeepSpeed 0.19.8 cannot be imported: ImportError: libaio.so.1: cannot open shared object file",
        f"see the whole cause with --debug, or {INSTEAD}",
    ),
}


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder, in which no rank may be started, before DeepSpeed has been looked for."""
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setattr(local, "run_local", lambda plan: pytest.fail("ranks were started"))
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    for name in [name for name in sys.modules if name.partition(".")[0] == "deepspeed"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "megatron_run_optimizer_deepspeed.zero", raising=False)
    return folder


def refused(words: str, code: int, work: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """What is said, in one line, of a run that ends with ``code`` and has written nothing."""
    assert main(words.split()) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert list(work.iterdir()) == []
    return captured.err.rstrip()


@pytest.mark.parametrize("words", ["", " --set parallel.data=2"])
@pytest.mark.parametrize("state", STATES)
def test_a_library_that_cannot_be_used_is_named_with_what_to_type(
    state: str, words: str, work: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    version, source, what, fix = STATES[state]
    site = FakeSite(tmp_path / "site")
    site.module("deepspeed", source)
    site.distribution("deepspeed", {}, version=version)
    with site.importable():
        said = refused(CHOSEN + words, 3, work, capsys)
    assert said.startswith(f"megatron-run: {what}")
    assert said.endswith(fix)


def test_without_the_library_it_says_how_to_install_it(
    work: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("megatron_run_optimizer_deepspeed.library.find_spec", lambda name: None)
    assert refused(CHOSEN, 3, work, capsys) == (
        "megatron-run: optimizer=deepspeed needs DeepSpeed, which is not installed "
        f"(from --plugin optimizer=deepspeed); {INSTALL}'deepspeed<0.20,>={MINIMUM}', or {INSTEAD}"
    )


def test_the_oldest_release_is_that_of_the_extra() -> None:
    (plugin,) = (member for member in PLUGINS if str(member) == "plugins/optimizer/deepspeed")
    (requirement,) = plugin.project["optional-dependencies"]["library"]
    assert requirement.startswith(f"deepspeed>={MINIMUM},")


def test_a_process_that_deepspeed_has_set_up_for_another_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cuda")
    check_kind("cpu", torch.device("cpu"))
    with pytest.raises(PluginError, match="set up for cuda in this process, and the run is on cpu") as refusal:
        check_kind("cuda", torch.device("cpu"))
    assert refusal.value.fix.startswith("set the variable DS_ACCELERATOR=cpu, or ")


def test_stage_three_is_refused_with_the_reason(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(f"{CHOSEN},stage=3", 2, work, capsys)
    assert said.startswith("megatron-run: optimizer.stage=3: ZeRO stage 3 cannot run here, since its hooks on modules")
    assert "set optimizer.stage to 1 or 2" in said
    assert "optimizer.stage=4: it must be 1 or 2" in refused(f"{CHOSEN},stage=4", 2, work, capsys)


def test_a_moment_that_would_not_decay_is_refused(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "it must be below 1" in refused(f"{CHOSEN} --set optimizer.betas=0.9,1.5", 2, work, capsys)


@pytest.mark.parametrize(
    ("words", "note"),
    [
        ((), "with one data-parallel rank stage 1 shards nothing"),
        (("parallel.data=2",), ""),
        (("parallel.data=2", "optimizer.stage=2"), "stage 2 saves no memory over stage 1 here"),
    ],
)
def test_a_stage_that_shards_nothing_is_noticed(words: tuple[str, ...], note: str) -> None:
    run = load_config("preset:tiny", plugins=["optimizer=deepspeed"], sets=list(words))
    notices = [notice for notice in run.notices if notice.startswith("optimizer=deepspeed")]
    assert len(notices) == bool(note)
    assert note in "".join(notices)


def test_experts_are_refused_since_fewer_ranks_share_them() -> None:
    config = load_config("preset:tiny", plugins=["optimizer=deepspeed"], sets=["parallel.data=2"]).config
    parallel = config.parallel.model_copy(update={"expert": 2})
    with pytest.raises(InputError, match=r"parallel\.expert=2 shares experts among some"):
        list(check_config(config.model_copy(update={"parallel": parallel}), Options()))


def test_biases_that_the_model_moves_are_refused_since_masters_are_kept_apart() -> None:
    sets = ["parallel.data=2", "model.experts.count=4", "model.experts.router.bias_rate=0.001"]
    with pytest.raises(Problems, match=r"model\.experts\.router\.bias_rate moves biases"):
        load_config("preset:tiny", plugins=["optimizer=deepspeed"], sets=sets)


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        ("plugins list", "megatron-run-optimizer-deepspeed"),
        ("plugins info optimizer=deepspeed", "use_multi_rank_bucket_allreduce"),
        (
            f"{CHOSEN} --set parallel.data=2 --dry-run",
            "12.07 bytes a parameter (parameters 0.2 + gradients 0.2 + state",
        ),
    ],
)
def test_it_is_listed_and_planned_without_the_library(
    words: str, shown: str, work: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("megatron_run_optimizer_deepspeed.library.find_spec", lambda name: None)
    monkeypatch.setattr(probe, "_ask_child", answer_here)
    assert main(words.split()) == 0
    assert shown in capsys.readouterr().out


def test_importing_the_plugin_does_not_import_the_library(tmp_path: Path) -> None:
    check_import("megatron_run_optimizer_deepspeed", "deepspeed", tmp_path)


def described(shape: tuple[int, ...], name: str, *, decay: bool = True) -> tuple[nn.Parameter, ParamInfo]:
    """The middle of a logical tensor: from row 2 and, of a matrix, column 4 on; its last row is padding."""
    whole = tuple(size + 10 for size in shape)
    column = 4 if len(shape) > 1 else 0
    parts = (Part(name, whole, range(shape[0] - 1), 2, column),)
    return nn.Parameter(torch.empty(shape)), ParamInfo(name, parts, Init("zeros"), decay)


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_shares_are_the_flat_group_cut_into_equal_partitions(ranks: int) -> None:
    infos = dict([described((5, 7), "a"), described((30,), "b", decay=False), described((3, 2, 20), "c")])
    numbers: dict[str, list[int]] = {"a": [], "b": [], "c": []}
    for rank in range(ranks):
        groups = flat_groups([infos, infos], lambda name: 1.0, ranks, rank)
        assert [group.decays for group in groups] == [True, False]
        for group in groups:
            values = torch.cat([parameter.flatten() for parameter in group.infos]).numel()
            assert group.partition == -(-values // (ranks * ALIGNMENT)) * ALIGNMENT
            starts = dict(zip(group.infos, accumulate((p.numel() for p in group.infos), initial=0), strict=False))
            for share in group.shares():
                assert len(share.param) == len(share.local) > 0
                assert range(group.partition)[share.local.start : share.local.stop] == share.local
                assert starts[share.parameter] + share.param.start == rank * group.partition + share.local.start
                numbers[share.info.name] += share.param
    assert numbers == {info.name: list(range(parameter.numel())) for parameter, info in infos.items()}


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_pieces_lead_back_to_the_logical_tensors(ranks: int) -> None:
    infos = dict([described((5, 7), "a"), described((3, 2, 20), "c")])
    wholes = {name: torch.arange(parameter.numel()) for parameter, name in ((p, i.name) for p, i in infos.items())}
    found = {name: torch.full(info.parts[0].shape, -1) for name, info in ((i.name, i) for i in infos.values())}
    for rank in range(ranks):
        for group in flat_groups([infos], lambda name: 1.0, ranks, rank):
            for share in group.shares():
                partition = torch.full((group.partition,), -2)
                partition[share.local.start : share.local.stop] = wholes[share.info.name][share.param]
                for piece in share.pieces():
                    box = tuple(
                        slice(start, start + size) for start, size in zip(piece.starts, piece.sizes, strict=True)
                    )
                    found[piece.name][box] = partition[piece.local].view(piece.sizes)
    for parameter, info in infos.items():
        rows, columns = parameter.shape[0] - 1, parameter.shape[1:]
        expected = torch.full(info.parts[0].shape, -1)
        box = (slice(2, 2 + rows), slice(4, 4 + columns[0]), *(slice(0, size) for size in columns[1:]))
        expected[box] = wholes[info.name].view(parameter.shape)[:rows]
        assert torch.equal(found[info.name], expected)


def test_factors_of_the_learning_rate_make_groups_of_their_own() -> None:
    infos = dict([described((5, 7), "a"), described((4, 4), "b"), described((3,), "c", decay=False)])
    groups = flat_groups([infos], Options(lr_mult=("a:0.5",)).update.factor, 2, 0)
    assert [(group.decays, group.lr_mult) for group in groups] == [(True, 0.5), (True, 1.0), (False, 1.0)]


def test_a_run_of_another_optimizer_may_go_on_with_it() -> None:
    """Options that both have must have equal defaults, or they look like a change of what is learned."""
    runs = [load_config("preset:tiny", plugins=[f"optimizer={name}"]) for name in ("adamw", "deepspeed", "zero1")]
    before, now, back = runs
    assert find_changes(identity(before), now) == find_changes(identity(now), back) == ()
