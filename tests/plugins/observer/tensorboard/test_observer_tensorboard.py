"""observer=tensorboard: what it writes, read back with tensorboard's own reader."""

from __future__ import annotations

import io
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron_run.contracts import Action, Bar, EvalMetrics, Timeline
from megatron_run.contracts.observer import STEP_CURVES
from megatron_run.contracts.schedule import Op
from megatron_run.files.latest_run import point_latest_at
from megatron_run_observer_tensorboard import TensorBoard, shown_by
from megatron_run_observer_tensorboard.picture import COLOURS, draw
from megatron_run_testing.observer import example_run, example_step

#: The names under which TensorBoard shows the runs of its arguments, a line each.
LISTING = """
import sys
from tensorboard.backend.event_processing.data_ingester import LocalDataIngester
from tensorboard.context import RequestContext
from tensorboard.plugins.core.core_plugin import CorePluginLoader
from tensorboard.program import TensorBoard

program = TensorBoard(plugins=[CorePluginLoader()])
program.configure([*sys.argv[1:], "--reload_task=blocking", "--reload_interval=0"])
ingester = LocalDataIngester(program.flags)
ingester.start()
print(*(run.run_name for run in ingester.data_provider.list_runs(RequestContext(), experiment_id="")), sep="\\n")
"""

OPS: tuple[Op, ...] = ("F", "B", "I", "W")


def read(folder: Path) -> Any:
    reader = EventAccumulator(str(folder / "tensorboard"), {"scalars": 0, "images": 0, "tensors": 0})
    return reader.Reload()


def trained(folder: Path, attempt: int = 1, first: int = 1, steps: int = 4) -> TensorBoard:
    observer = TensorBoard()
    observer.on_train_start(example_run(folder, attempt=attempt, first_step=first, steps=steps))
    for step in range(first, steps + 1):
        observer.on_step_end(example_step(step, attempt + step / 8))
    return observer


def test_every_number_of_a_step_is_a_curve(tmp_path: Path) -> None:
    trained(tmp_path).on_train_end("finished")
    reader = read(tmp_path)
    drawn = set(reader.Tags()["scalars"])
    trained_curves = {name for name in STEP_CURVES if name.startswith("train/")}
    others = {f"vitals/{name.replace('/', '_')}" for name in {*STEP_CURVES, "model/aux"} - trained_curves}
    assert drawn == trained_curves | others | {"validation/baseline_byte_bigram"}
    points = reader.Scalars("train/loss")
    assert [(point.step, point.value, point.wall_time) for point in points] == [
        (step, 1 + step / 8, 1_700_000_000 + step) for step in range(1, 5)
    ]
    assert [point.value for point in reader.Scalars("vitals/data_tokens")] == [512, 1024, 1536, 2048]
    assert [(point.step, point.value) for point in reader.Scalars("validation/baseline_byte_bigram")] == [
        (0, 2.5),
        (4, 2.5),
    ]


def test_what_is_not_finite_leaves_a_gap(tmp_path: Path) -> None:
    observer = trained(tmp_path, steps=1)
    observer.on_step_end(example_step(2, float("nan"), skipped_total=1))
    observer.on_step_end(example_step(3, None, skipped_total=2))
    observer.on_train_end("stopped")
    reader = read(tmp_path)
    assert [point.step for point in reader.Scalars("train/loss")] == [1]
    assert [point.value for point in reader.Scalars("train/skipped")] == [0, 1, 2]


def test_evaluations_have_tags_by_split(tmp_path: Path) -> None:
    observer = trained(tmp_path)
    observer.on_eval_end(EvalMetrics(4, "validation", 1.5, 4.5, 64))
    observer.on_eval_end(EvalMetrics(4, "test", 2.5, 12.5, 64))
    observer.on_eval_end(EvalMetrics(4, "lambada", 3.5, 33.0, 8, {"accuracy": 0.25}))
    observer.on_train_end("finished")
    reader = read(tmp_path)
    points = {"loss": 1.5, "perplexity": 4.5}
    assert {name: reader.Scalars(f"validation/{name}")[0].value for name in points} == points
    assert reader.Scalars("validation_test/loss")[0].value == 2.5
    assert reader.Scalars("validation_lambada/accuracy")[0].value == 0.25


def test_the_training_comes_first_among_the_groups_and_then_its_evaluation(tmp_path: Path) -> None:
    observer = trained(tmp_path)
    observer.on_eval_end(EvalMetrics(4, "validation", 1.5, 4.5, 64))
    observer.on_train_end("finished")
    tags = read(tmp_path).Tags()
    groups = sorted({tag.partition("/")[0] for tag in (*tags["scalars"], *tags["images"])})
    assert groups == ["train", "validation", "vitals"]


def test_every_step_can_be_read_while_the_run_goes_on(tmp_path: Path) -> None:
    observer = trained(tmp_path, steps=2)
    assert [point.step for point in read(tmp_path).Scalars("train/loss")] == [1, 2]
    observer.on_step_end(example_step(3))
    assert [point.step for point in read(tmp_path).Scalars("train/loss")] == [1, 2, 3]
    observer.on_train_end("finished")


def test_configuration_plan_and_sample_are_text(tmp_path: Path) -> None:
    observer = trained(tmp_path)
    observer.on_sample("def f():\n    return '**not bold**'\n")
    observer.on_train_end("finished")
    reader = read(tmp_path)

    def text(tag: str) -> str:
        (event,) = reader.Tensors(tag)
        return str(event.tensor_proto.string_val[0].decode())

    assert "train:\n  steps: 4" in text("run/config")
    assert "schedule  1f1b" in text("run/plan")
    assert text("eval/sample") == "    def f():\n        return '**not bold**'"
    assert reader.SummaryMetadata("run/config").plugin_data.plugin_name == "text"


def test_a_resumed_run_replaces_the_steps_it_repeats(tmp_path: Path) -> None:
    trained(tmp_path, attempt=1, steps=5).on_error(RuntimeError("killed"))
    trained(tmp_path, attempt=2, first=4, steps=6).on_train_end("finished")
    points = read(tmp_path).Scalars("train/loss")
    assert [(point.step, int(point.value)) for point in points] == [
        (step, (1 if step < 4 else 2) + step // 8) for step in range(1, 7)
    ]


def test_the_timeline_is_a_picture(tmp_path: Path) -> None:
    trained(tmp_path).on_train_end("finished")
    (image,) = read(tmp_path).Images("vitals/pipeline")
    picture = Image.open(io.BytesIO(image.encoded_image_string))
    assert picture.size == (image.width, image.height)
    assert picture.tobytes() == draw(example_run(tmp_path).timeline).tobytes()


def test_the_picture_shows_each_action_when_it_runs(tmp_path: Path) -> None:
    """The example: F 0-1, then B 4-6 on stage 0; F 1-2, I 2-3, W 3-4 on stage 1."""
    picture = draw(example_run(tmp_path).timeline)
    found = [[colour_at(picture, stage, slot + 0.25, unit=320 / 6) for slot in range(6)] for stage in range(2)]
    forward, backward, inputs, weights = (COLOURS[op][0] for op in OPS)
    assert found[0] == [forward, GAP, GAP, GAP, backward, backward]
    assert found[1] == [GAP, forward, inputs, weights, GAP, GAP]


def test_a_long_step_is_broken_into_bands_that_a_thumbnail_shows() -> None:
    """Units 0-10 are forwards; a backward of 10-14 crosses the end of the first band of 12 units; then a gap."""
    bars = (*(Bar(Action("F", m, 0), m, m + 1) for m in range(10)), Bar(Action("B", 0, 0), 10, 14))
    picture = draw(Timeline((bars,), 18, 4 / 18))
    assert picture.width == 360
    forward, backward = COLOURS["F"][0], COLOURS["B"][0]
    rows = [[colour_at(picture, row, slot + 0.25, unit=320 / 12) for slot in (9, 10, 11)] for row in (0,)]
    assert rows == [[forward, backward, backward]]
    second = [colour_at(picture, 0, slot + 0.25, unit=320 / 12, top=36) for slot in (0, 1, 2)]
    assert second == [backward, backward, GAP]


def test_the_picture_of_a_very_long_step_has_its_beginning_and_its_end() -> None:
    bars = tuple(Bar(Action("F" if m < 600 else "B", m, 0), m, m + 1) for m in range(1200))
    picture = draw(Timeline((bars,) * 8, 1200, 0.0))
    assert picture.height < 1500
    assert colour_at(picture, 0, 0.25, unit=320 / 12) == COLOURS["F"][0]
    pixels = picture.crop((0, picture.height - 250, 360, picture.height - 60)).getcolors()
    colours = {colour for _, colour in pixels or ()}
    assert COLOURS["B"][0] in colours
    assert COLOURS["F"][0] not in colours


GAP = (238, 238, 238)


def colour_at(picture: Image.Image, row: int, time: float, unit: float, top: float = 6) -> Any:
    """The colour of ``row`` of a band that begins at ``top``, ``time`` after its beginning."""
    return picture.getpixel((round(34 + time * unit), round(top + 20 * row + 4)))


def test_a_folder_that_cannot_be_written_raises_at_every_event(tmp_path: Path) -> None:
    (tmp_path / "tensorboard").write_text("in the way")
    observer = TensorBoard()
    with pytest.raises(NotADirectoryError):
        observer.on_train_start(example_run(tmp_path))
    with pytest.raises(RuntimeError, match="not open"):
        observer.on_step_end(example_step(1))


@pytest.mark.multiproc
def test_importing_the_plugin_is_light() -> None:
    code = (
        "import sys, megatron_run_observer_tensorboard; "
        "print([name for name in ('torch', 'tensorboard', 'PIL', 'google.protobuf') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "[]\n"


def test_the_end_says_what_to_type(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, programs = tmp_path / "a run", tmp_path / "env"
    folder.mkdir()
    programs.mkdir()
    (programs / "tensorboard").touch(mode=0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "executable", str(programs / "python"))
    for path, program in (("", "env/tensorboard"), (str(programs), "tensorboard")):
        monkeypatch.setenv("PATH", path)
        trained(folder, attempt=1 + bool(path)).on_train_end("finished")
        assert capsys.readouterr().out == f"to see it in TensorBoard: {program} --logdir_spec 'a run:a run'\n"


def shown(*words: str) -> list[str]:
    """The runs that TensorBoard lists by these words of its command."""
    listing = (sys.executable, "-c", LISTING, *words)
    return subprocess.run(listing, capture_output=True, text=True, check=True).stdout.splitlines()


@pytest.mark.multiproc
@pytest.mark.parametrize(
    ("name", "listed"),
    [("a run", "a run/tensorboard"), ("1,2", "tensorboard"), ("wide/run-000", "wide/run-000/tensorboard")],
)
def test_what_is_typed_lists_the_run_by_its_name(
    name: str, listed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "runs" / name
    folder.mkdir(parents=True)
    (tmp_path / "runs" / "wide").mkdir(exist_ok=True)
    (tmp_path / "runs" / "wide" / "sweep.json").touch()
    trained(folder, attempt=1).on_train_end("finished")
    monkeypatch.chdir(tmp_path)
    assert shown(*shlex.split(shown_by(folder))) == [listed]


@pytest.mark.multiproc
def test_the_newest_run_is_shown_once_of_all_runs(tmp_path: Path) -> None:
    runs = [tmp_path / name for name in ("20261126-120000-00aa", "20261126-130000-00bb", "mine")]
    for folder in runs:
        folder.mkdir()
        trained(folder).on_train_end("finished")
    point_latest_at(runs[1])
    assert sorted(shown("tensorboard", "--logdir", str(tmp_path))) == [f"{folder.name}/tensorboard" for folder in runs]
