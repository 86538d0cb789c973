"""``doctor`` names the files of CUDA's libraries that torch and Transformer Engine use, and survives their import."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
import torch

from megatron_run_cli.commands import doctor
from megatron_run_cli.reports.library_report import LibraryReport, report_libraries
from tests.support.cuda_copies import Copies, make_engine, make_torch

compiled = pytest.mark.skipif(
    sys.platform != "linux" or shutil.which("cc") is None, reason="libraries are compiled for Linux"
)
TORCHS = {"cudnn": ["/pip/libcudnn.so.9"]}


def site_of(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Copies:
    """A site with ``torch`` and its libraries, in front of all others."""
    copies = Copies(folder / "nvidia" / "cudnn" / "lib", folder / "nvidia" / "cu13" / "lib").make()
    make_torch(folder, copies)
    monkeypatch.syspath_prepend(str(folder))
    return copies


@compiled
def test_files_of_both_are_found_in_a_process_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copies = site_of(tmp_path, monkeypatch)
    make_engine(tmp_path, copies)
    report = report_libraries()
    assert report == LibraryReport(copies.used, copies.used, "of unknown version")
    assert report.line("nvrtc") == f"torch: {copies.files['nvrtc']}; Transformer Engine: the same"


@compiled
def test_an_import_that_fails_is_told_and_torchs_files_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copies = site_of(tmp_path, monkeypatch)
    make_engine(tmp_path, copies)
    (tmp_path / "transformer_engine" / "libtransformer_engine.so").unlink()
    report = report_libraries()
    assert "libtransformer_engine.so: cannot open shared object file" in report.problem
    assert report.line("cudnn") == f"torch: {copies.files['cudnn']}"


@compiled
def test_an_import_that_ends_the_process_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site_of(tmp_path, monkeypatch)
    (tmp_path / "transformer_engine.py").write_text("import os\nos.abort()\n")
    assert report_libraries().problem == "importing it ended the process with code -6"


def test_a_torch_that_cannot_be_imported_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text("raise OSError('libcudart.so.13: cannot open shared object file')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(RuntimeError, match=r"libcudart\.so\.13: cannot open"):
        report_libraries()


def test_an_import_that_takes_too_long_is_told() -> None:
    with pytest.raises(RuntimeError, match=r"took longer than 0\.1 s"):
        report_libraries(("-c", "import time; time.sleep(60)"), timeout=0.1)


def test_two_files_of_one_library_are_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    both = {"cudnn": [*TORCHS["cudnn"], "/lib/libcudnn.so.9"], "curand": ["/lib/libcurand.so.10"]}
    report = LibraryReport(TORCHS, both, "2.20.2")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr("megatron_run_cli.reports.library_report.report_libraries", lambda: report)
    found = {each.topic: (each.state, each.text) for each in doctor._cuda_libraries()}
    assert found["transformer-engine"] == ("ok", "2.20.2")
    assert found["cudnn"] == ("AMBIGUOUS", "torch: /pip/libcudnn.so.9; Transformer Engine: /lib/libcudnn.so.9")
    assert found["curand"] == ("ok", "torch: no file of its own; Transformer Engine: /lib/libcurand.so.10")


def test_a_torch_for_cpus_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    assert list(doctor._cuda_libraries()) == []
