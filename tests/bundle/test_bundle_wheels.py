"""A wheel whose library is narrowed stays true and licensed; wheels that the target has are left out, no others."""

from __future__ import annotations

import base64
import csv
import zipfile
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path

import pytest

from tests.bundle.__main__ import had_there
from tests.bundle.test_bundle_fatbin import fatbin, library
from tests.bundle.wheels import leave_out, narrow_wheel, read_had

LICENCE = "engine-2.0.dist-info/licenses/LICENSE"


def recorded(data: bytes) -> str:
    return "sha256=" + base64.urlsafe_b64encode(sha256(data).digest()).rstrip(b"=").decode()


def wheel(folder: Path, name: str, files: Mapping[str, bytes], *requires: str, version: str = "2.0") -> Path:
    info = f"{name}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    metadata += "".join(f"Requires-Dist: {each}\n" for each in requires)
    whole = {**files, f"{info}/METADATA": metadata.encode()}
    lines = [f"{file},{recorded(data)},{len(data)}" for file, data in whole.items()]
    whole |= {f"{name}/_vendor/{file}": b"another's" for file in ("a-1.dist-info/METADATA", "a-1.dist-info/RECORD")}
    lines += [f"{file},{recorded(data)},{len(data)}" for file, data in whole.items() if "_vendor" in file]
    made = folder / f"{name}-{version}-py3-none-any.whl"
    folder.mkdir(exist_ok=True)
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as archive:
        for file, data in whole.items():
            archive.writestr(file, data)
        archive.writestr(f"{info}/RECORD", "\n".join([*lines, f"{info}/RECORD,,", ""]))
    return made


def test_a_narrowed_wheel_is_true_and_keeps_its_licence(tmp_path: Path) -> None:
    whole = library(fatbin((2, 80, 64, bytes(range(256)) * 400), (2, 90, 64, b"code")))
    made = wheel(tmp_path, "engine", {"engine/lib.so": whole, "engine/a.py": b"x = 1\n", LICENCE: b"Apache"})
    before = made.stat().st_size
    narrow_wheel(made, "engine/lib.so", 90)
    assert made.stat().st_size < before
    with zipfile.ZipFile(made) as archive:
        assert archive.testzip() is None
        files = {name: archive.read(name) for name in archive.namelist()}
    assert len(files["engine/lib.so"]) == len(whole)
    assert files["engine/lib.so"] != whole
    assert files[LICENCE] == b"Apache"
    record = list(csv.reader(files.pop("engine-2.0.dist-info/RECORD").decode().splitlines()))
    assert record.pop() == ["engine-2.0.dist-info/RECORD", "", ""]
    assert record == [[name, recorded(data), str(len(data))] for name, data in files.items()]
    assert sorted(tmp_path.iterdir()) == [made]


def test_the_output_of_pip_is_read() -> None:
    text = "# here\nnumpy==2.5.5\nPillow == 13.0\nfile_lock @ file:///a/wheel.whl\n-e /some/folder\n\ntqdm\n"
    assert read_had(text) == {"numpy": "2.5.5", "pillow": "13.0", "file-lock": "", "tqdm": ""}


def test_another_file_is_no_list(tmp_path: Path) -> None:
    listed = tmp_path / "table"
    listed.write_text("Package Version\n------- -------\nnumpy 2.5.5\n")
    with pytest.raises(SystemExit, match="table is no list of packages, as python3 -m pip list --format=freeze prints"):
        had_there(listed)
    with pytest.raises(SystemExit, match="absent is no list of packages"):
        had_there(tmp_path / "absent")


@pytest.mark.parametrize(
    ("had", "left"),
    [
        ("", []),
        ("base==1.5\nother\n", ["base"]),
        ("base\ncore\npip\n", ["base", "core"]),
        ("top==1.0\nbase==1.5\n", ["base"]),  # top of that version is too old for us, and top needs no newer base
        ("core==1.0\n", []),  # top, which stays, needs another core
        ("top==2.0\ncore==1.0\n", ["core", "top"]),  # the target's own top has what it needs
        ("base==0.9\n", []),
    ],
)
def test_what_the_target_has_is_left_out_where_it_will_do(had: str, left: list[str], tmp_path: Path) -> None:
    for name, requires in {
        "top": ("core==2.0", "base>=1", "never>=5; extra == 'all'"),
        "core": (),
        "base": (),
        "pip": (),
    }.items():
        wheel(tmp_path / "wheels", name, {}, *requires)
    assert sorted(leave_out(tmp_path / "wheels", read_had(had), ["top>=2"], ["pip"])) == left
    kept = {file.name.partition("-")[0] for file in (tmp_path / "wheels").iterdir()}
    assert kept == {"top", "core", "base", "pip"} - set(left)
