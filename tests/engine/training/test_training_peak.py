"""The peak of a device, and the mfu of a step as a fraction of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from megatron_run.contracts import DevicePeak
from megatron_run.contracts.schema import RunSection
from megatron_run_engine.training.observers import start_observers
from megatron_run_engine.training.peak import device_peak, known_peak
from tests.support.training_bench import Bench

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("name", "precision", "tflops"),
    [
        ("NVIDIA A100-SXM4-80GB", "bf16", 312.0),
        ("NVIDIA A100 80GB PCIe", "fp32", 19.5),
        ("NVIDIA H100 80GB HBM3", "fp16", 989.0),
        ("NVIDIA H100 PCIe", "bf16", 756.0),
        ("NVIDIA H100 NVL", "bf16", 835.0),
        ("NVIDIA GH200 480GB", "bf16", 989.0),
        ("NVIDIA L40S", "bf16", 362.0),
        ("NVIDIA A100X", "bf16", None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "bf16", None),
        ("NVIDIA GeForce GTX 750", "fp32", None),
    ],
)
def test_a_device_is_known_by_its_whole_name(name: str, precision: str, tflops: float | None) -> None:
    assert known_peak(name, precision) == tflops


def test_an_unknown_gpu_has_no_peak_unless_the_user_gives_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA Something")
    assert device_peak(RunSection(), "bf16", torch.device("cuda")) is None
    given = device_peak(RunSection(peak_tflops=12.5), "bf16", torch.device("cuda"))
    assert given == DevicePeak(12.5, "run.peak_tflops")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H200")
    assert device_peak(RunSection(), "bf16", torch.device("cuda")) == DevicePeak(989.0, "data sheet")


def test_a_cpu_has_no_peak_and_a_step_no_mfu_unless_the_user_gives_one(tmp_path: Path) -> None:
    assert device_peak(RunSection(), "fp32", CPU) is None
    assert device_peak(RunSection(peak_tflops=0.5), "fp32", CPU) == DevicePeak(0.5, "run.peak_tflops")
    bench = Bench(tmp_path, "train.steps=1", "run.peak_tflops=null")
    bench.train()
    (step,) = bench.watch.steps
    assert step.mfu is None
    assert "speed/mfu" not in step.curves()


def test_the_mfu_of_a_step_is_a_fraction_of_the_peak(tmp_path: Path) -> None:
    bench = Bench(tmp_path, "train.steps=2", "run.peak_tflops=0.25")
    bench.train()
    for step in bench.watch.steps:
        assert step.mfu == pytest.approx(4 * step.tflops_per_device)
        expected = 32 * 8 * bench.assembly.flops_per_token / step.step_time_s / 1e12
        assert step.tflops_per_device == pytest.approx(expected)


def test_a_run_records_its_device_and_where_the_peak_is_from(tmp_path: Path) -> None:
    bench = Bench(tmp_path, "train.steps=1", "run.peak_tflops=3", plugins=["observer=jsonl"])
    folder = bench.trainer._folder
    start_observers(bench.run, bench.assembly, folder, bench.trainer.beginning).on_train_end("finished")
    record = json.loads((bench.folder / "device.json").read_text())
    assert (record["device"], record["precision"]) == ("cpu", "fp32")
    assert (record["peak_tflops"], record["peak_source"]) == (3.0, "run.peak_tflops")
