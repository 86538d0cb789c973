from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from megatron_run.config.values import flat
from megatron_run.errors import CheckpointError, DataError, ExitCode, InputError, Problems
from megatron_run.planning import load_config, resolve
from megatron_run_cli.main import main
from megatron_run_cli.reports.dry_run import dry_run_json, dry_run_text, slots_text
from megatron_run_engine.capture import Pass, shared_slots
from megatron_run_engine.data.indexed_files import IndexedWriter
from megatron_run_engine.estimate import step_memory
from megatron_run_planner.devices import read_device
from tests.support.forked import tiny
from tests.support.small_models import LENGTH, saved_network


def test_the_picture_shows_who_holds_a_slot_and_until_when() -> None:
    order = [Pass("F", 0, 0), Pass("F", 0, 1), Pass("B", 0, 0), Pass("end", 0, 0), Pass("B", 0, 1), Pass("end", 0, 1)]
    first, second, legend = slots_text(order, shared_slots(order)).splitlines()
    assert (first, second) == ("slot 0 |0-a.|", "slot 1 |.1-b|")
    assert "digit" in legend


def report(folder: Path, **values: object) -> str:
    asked = tiny(folder, {key.replace("__", "."): value for key, value in values.items()})
    return dry_run_text(resolve(asked, plan_only=True))


def test_without_the_planner_a_dry_run_lacks_nothing_but_the_fit_to_a_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = report(tmp_path / "new")
    for name in [name for name in sys.modules if name.startswith("megatron_run_planner")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "megatron_run_planner", None)
    assert report(tmp_path / "new") == whole
    assert main(["preset:tiny", "--dry-run", "--device", "a100"]) == ExitCode.PLUGIN
    said = capsys.readouterr().err
    assert said.startswith(
        "megatron-run: this command cannot run: there is no module 'megatron_run_planner'; type: pip "
    )
    assert said.count("\n") == 1


def test_a_dry_run_refuses_a_folder_that_a_start_would_and_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "mine").touch()
    with pytest.raises(InputError, match="it holds other files and no"):
        report(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
    assert "parameters of the model" in report(tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_dry_run_refuses_weights_with_other_positions_than_the_sequence(tmp_path: Path) -> None:
    given = {"num_layers": 1, "hidden_size": 16, "num_heads": 2, "vocab_size": 32, "position": "learned"}
    _, options = saved_network(tmp_path / "source", given)
    said = flat({"model": options.model_dump(mode="json")})
    model = {key: value for key, value in said.items() if value is not None}
    values = {**model, "run.init_from": str(tmp_path / "source"), "data.vocab_size": 32}

    def shown(length: int) -> str:
        asked = tiny(tmp_path / "run", {**values, "train.sequence_length": length})
        return dry_run_text(resolve(asked, plan_only=True))

    assert shown(LENGTH)
    with pytest.raises(CheckpointError, match=rf"embedding.position.weight is \[{LENGTH}, 16\] there"):
        shown(2 * LENGTH)


def test_a_dry_run_reads_a_sample_of_each_split(tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "set", np.uint16) as writer:
        for document in ([1] * 500, [31] * 500):
            writer.add(np.array(document))
            writer.end_document()
    data = {"data.use": "indexed", "data.paths": str(tmp_path / "set"), "data.split": [1, 1, 0]}

    def shown(ids: int) -> str:
        return dry_run_text(resolve(tiny(tmp_path / "run", {**data, "data.vocab_size": ids}), plan_only=True))

    assert shown(32)
    with pytest.raises(
        DataError, match=r"token 31 at byte 1000 of .*set.bin is outside of the vocabulary: it has 31 ids"
    ):
        shown(31)


def test_a_dry_run_says_when_a_rank_needs_more_than_this_machine_has(tmp_path: Path) -> None:
    assert "this machine cannot train it: a rank needs" in report(tmp_path / "run", model__hidden_size=10_000_000)


def test_what_lies_in_host_memory_and_what_ranks_share_is_said(tmp_path: Path) -> None:
    values = {"parallel.data": 2, "optimizer.state_on_host": True, "optimizer.use": "zero3", "optimizer.whole_below": 0}
    run = resolve(tiny(tmp_path / "run", values, nproc=2), plan_only=True)
    record = dry_run_json(run)
    (held,), (roles,) = record["host_memory_by_stage"], record["memory_by_stage"]
    assert held == sum(size for role, size in roles.items() if role.startswith("host_"))
    text = dry_run_text(run)
    assert f"of it in host memory: {held / 2**20:.1f} MiB" in text
    assert f"parameters of a stage, which its ranks share: {record['parameters']:,} on stage 0" in text
    assert "of it in host memory" not in report(tmp_path / "run")


def test_a_dry_run_for_a_device_does_not_speak_of_this_machine(tmp_path: Path) -> None:
    run = resolve(tiny(tmp_path / "run", {"model.hidden_size": 10_000_000}), plan_only=True)
    shown = dry_run_text(run, read_device("a100"))
    assert "does not fit A100" in shown
    assert "this machine" not in shown
    assert dry_run_json(run, read_device("a100"))["notices"] == []


def test_a_row_longer_than_berts_positions_is_refused_when_it_is_planned(tmp_path: Path) -> None:
    values = {"model.max_positions": 8, "train.sequence_length": 16}
    with pytest.raises(Problems, match="a row of 16 tokens"):
        resolve(tiny(tmp_path / "run", values, ("model=bert",)))


def test_more_layers_than_are_built_are_planned_and_not_counted(tmp_path: Path) -> None:
    """What a start would refuse beside the model is refused all the same."""
    deep = {"model.num_layers": 20_000}
    text = dry_run_text(load_config("preset:tiny", sets=deep), read_device("a100"))
    assert "parameters, memory and graphs are not counted: 20,001 layers and stages would be built" in text
    assert "memory of a rank, of 80.0 GiB on A100 80 GB" in text
    (tmp_path / "other").write_text("")
    with pytest.raises(InputError, match="is not a run folder"):
        dry_run_text(load_config("preset:tiny", sets={**deep, "run.folder": str(tmp_path)}))


def test_what_layers_keep_is_the_planners_where_they_are_too_many_to_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_memory, "MOST_RUN", 3)
    record = dry_run_json(load_config("preset:tiny", sets={"model.num_layers": 4}), read_device("a100"))
    assert record["parameters"] > 4 * 12 * 32**2
    assert record["activations_by_stage"] is None
    assert record["memory"]["by_stage"][0]["activations"] > 0
