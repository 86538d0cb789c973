"""Loss scales and precisions: what cannot be is one line with its exit code, what is worth knowing a notice."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from megatron_run_cli.main import main
from megatron_run_cli.reports import dry_run

Output = pytest.CaptureFixture[str]

FP16 = "--set train.precision=fp16"
#: What is typed after ``megatron-run preset:tiny --dry-run`` and the one line it gets, with exit code 2.
MISTAKES = {
    "fp16 without a scale": (
        f"{FP16} --plugin scaler=none",
        (
            "train.precision=fp16 needs a plugin that serves it: scaler=none does not (from --set train.precision); "
            "choose --plugin scaler=constant or --plugin scaler=dynamic; or set train.precision=bf16"
        ),
    ),
    "an unknown precision": (
        "--set train.precision=fp8",
        "train.precision=fp8: it must be 'fp32', 'bf16' or 'fp16' (from --set train.precision)",
    ),
    "constant without its number": (
        "--plugin scaler=constant",
        (
            "scaler.loss_scale is not set: scaler=constant needs it; "
            "add --set scaler.loss_scale=... or write it into the file"
        ),
    ),
    "dynamic with the number of constant": (
        "--plugin scaler=dynamic,loss_scale=1024",
        (
            "unknown key scaler.loss_scale (from --plugin scaler=dynamic,loss_scale=1024); choose --plugin "
            "scaler=constant, which has it; scaler=dynamic has initial_loss_scale, min_loss_scale, loss_scale_window, "
            "hysteresis, growth_factor, backoff_factor"
        ),
    ),
    "an option of dynamic where none is chosen": (
        "--set scaler.loss_scale_window=10",
        (
            "unknown key scaler.loss_scale_window (from --set scaler.loss_scale_window); choose --plugin "
            "scaler=dynamic, which has it; scaler=none has no options"
        ),
    ),
    "a misspelt option": (
        f"{FP16} --set scaler.hystersis=3",
        "unknown key scaler.hystersis (from --set scaler.hystersis); did you mean 'hysteresis'?",
    ),
    "a scale that is none": (
        "--set scaler.loss_scale=0",
        "scaler.loss_scale=0: it must be at least 1e-30 (from --set scaler.loss_scale)",
    ),
    "a scale whose reciprocal is none": (
        "--set scaler.loss_scale=1e38",
        "scaler.loss_scale=1e+38: it must be at most 1e+30 (from --set scaler.loss_scale)",
    ),
    "an infinite scale": (
        "--set scaler.loss_scale=.inf",
        "scaler.loss_scale=Infinity: it must be a finite number (from --set scaler.loss_scale)",
    ),
    "a factor that does not grow": (
        f"{FP16} --set scaler.growth_factor=1",
        "scaler.growth_factor=1: it must be above 1 (from --set scaler.growth_factor)",
    ),
    "a factor that does not back off": (
        f"{FP16} --set scaler.backoff_factor=1",
        "scaler.backoff_factor=1: it must be below 1 (from --set scaler.backoff_factor)",
    ),
    "no window": (
        f"{FP16} --set scaler.loss_scale_window=0",
        "scaler.loss_scale_window=0: it must be at least 1 (from --set scaler.loss_scale_window)",
    ),
    "no hysteresis": (
        f"{FP16} --set scaler.hysteresis=0",
        "scaler.hysteresis=0: it must be at least 1 (from --set scaler.hysteresis)",
    ),
    "a minimum above the beginning": (
        f"{FP16} --set scaler.min_loss_scale=32 --set scaler.initial_loss_scale=16",
        (
            "scaler.min_loss_scale=32: it must be at most scaler.initial_loss_scale, which is 16 "
            "(from --set scaler.min_loss_scale)"
        ),
    ),
    "a beginning below the usual minimum": (
        f"{FP16} --set scaler.initial_loss_scale=0.5",
        (
            "scaler.min_loss_scale=1.0: it must be at most scaler.initial_loss_scale, which is 0.5 "
            "(from --set scaler.initial_loss_scale)"
        ),
    ),
}

NEEDLESS = "do not vanish as those of fp16 do"
ROUNDS = "is not a power of two: scaling by it rounds gradients"
#: What is typed, and the notices.
NOTICES = {
    "fp16": (FP16, ["scaler=dynamic is the default with train.precision=fp16"]),
    "fp16 and dynamic": (f"{FP16} --plugin scaler=dynamic", []),
    "fp16 and a number": (
        f"{FP16} --set scaler.loss_scale=1024",
        ["scaler=constant is the default with scaler.loss_scale"],
    ),
    "bf16": ("--set train.precision=bf16", []),
    "bf16 and dynamic": (
        "--set train.precision=bf16 --plugin scaler=dynamic",
        [f"scaler=dynamic is not needed: gradients of train.precision=bf16 {NEEDLESS}"],
    ),
    "fp32 and constant": (
        "--plugin scaler=constant,loss_scale=2",
        [f"scaler=constant is not needed: gradients of train.precision=fp32 {NEEDLESS}"],
    ),
    "a constant that rounds": (
        f"{FP16} --plugin scaler=constant,loss_scale=1000",
        [f"scaler.loss_scale=1000 {ROUNDS}"],
    ),
    "factors that round": (
        f"{FP16} --plugin scaler=dynamic,growth_factor=1.5,backoff_factor=0.3,min_loss_scale=3,initial_loss_scale=5e9",
        [
            f"scaler.initial_loss_scale=5000000000 {ROUNDS}",
            f"scaler.min_loss_scale=3 {ROUNDS}",
            f"scaler.growth_factor=1.5 {ROUNDS}",
            f"scaler.backoff_factor=0.3 {ROUNDS}",
        ],
    ),
    "an option that the stronger choice lacks": (
        f"window.yaml {FP16} --plugin scaler=constant,loss_scale=2",
        ["scaler=constant has no scaler.loss_scale_window, written for another scaler: dropped"],
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_gets_one_line(mistake: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Output) -> None:
    typed, line = MISTAKES[mistake]
    monkeypatch.chdir(tmp_path)
    assert main(["preset:tiny", *shlex.split(typed), "--dry-run"]) == 2
    said = capsys.readouterr()
    assert (said.out, said.err) == ("", f"megatron-run: {line}\n")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("case", NOTICES)
def test_what_is_worth_knowing_is_a_notice(
    case: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Output
) -> None:
    monkeypatch.setattr(dry_run, "_step_memory", lambda *_: None)  # a third of a second, for what nobody reads
    typed, notices = NOTICES[case]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "window.yaml").write_text("scaler: {use: dynamic, loss_scale_window: 10}\n")
    assert main(["preset:tiny", *shlex.split(typed), "--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.removeprefix("note: ") for line in lines if line.startswith("note: ")] == notices
