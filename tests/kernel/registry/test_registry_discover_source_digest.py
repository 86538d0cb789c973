from __future__ import annotations

import hashlib
from importlib import import_module
from pathlib import Path

from megatron_run.registry.choose import choose
from megatron_run.registry.discover import Catalog, SourceDigests, source_digest
from megatron_run.registry.load import load
from tests.support.fake_plugins import FakeSite, schedule_source


def digest_of(folder: Path, files: dict[str, str]) -> str:
    """The digest of a package of ``files``, made in ``folder``."""
    site = FakeSite(folder)
    for path, text in files.items():
        (site.folder / path).parent.mkdir(parents=True, exist_ok=True)
        (site.folder / path).write_text(text)
    with site.importable():
        return source_digest(import_module("acme.inner.plugin"))


FILES = {
    "acme/__init__.py": "",
    "acme/inner/__init__.py": "",
    "acme/inner/plugin.py": "x = 1",
    "acme/other.py": "y = 2",
}


def test_equal_packages_have_equal_digests_wherever_they_lie(tmp_path: Path) -> None:
    assert digest_of(tmp_path / "a", FILES) == digest_of(tmp_path / "b", FILES)


def test_any_source_file_of_the_package_counts(tmp_path: Path) -> None:
    changes = (
        {**FILES, "acme/other.py": "y = 3"},
        {**FILES, "acme/added.py": ""},
        {**FILES, "acme/inner/plugin.py": "x = 2"},
        {path.replace("other", "renamed"): text for path, text in FILES.items()},
    )
    digests = {digest_of(tmp_path / str(index), files) for index, files in enumerate((FILES, *changes))}
    assert len(digests) == 5


def test_what_is_no_source_does_not_count(tmp_path: Path) -> None:
    more = {**FILES, "acme/__pycache__/other.cpython-311.pyc": "x", "acme/notes.txt": "x", "beside/__init__.py": "x"}
    assert digest_of(tmp_path / "a", FILES) == digest_of(tmp_path / "b", more)


def test_a_namespace_around_the_package_does_not_count(tmp_path: Path) -> None:
    inner = {path: text for path, text in FILES.items() if path != "acme/__init__.py"}
    other = {**inner, "acme/other.py": "changed by someone else"}
    assert digest_of(tmp_path / "a", inner) == digest_of(tmp_path / "b", other)


def test_a_package_with_many_plugins_is_read_once(tmp_path: Path) -> None:
    digest_of(tmp_path, FILES)
    digests = SourceDigests()
    with FakeSite(tmp_path).importable():
        first = digests.of(import_module("acme.inner.plugin"))
        (tmp_path / "acme" / "other.py").write_text("y = 3")
        assert digests.of(import_module("acme.other")) == first
        assert source_digest(import_module("acme.other")) != first


def test_the_digest_of_a_file_is_that_of_its_bytes(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(schedule_source())
    plugin = load(choose(Catalog(()), "schedule", str(file), "test"), "test")
    assert plugin.digest == hashlib.sha256(file.read_bytes()).hexdigest()
