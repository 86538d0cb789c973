"""``megatron-run plugins search``: a catalogue from an address or a file, whoever wrote it; else what is installed."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from megatron_run.contracts.plugin import COMMAND
from megatron_run.errors.install_hint import how_to_install
from megatron_run.registry.discover import Catalog, scan
from megatron_run.registry.known import KNOWN_COMMANDS
from megatron_run_cli.main import main
from megatron_run_cli.reports import catalogue

ZIGZAG = {"kind": "schedule", "name": "zigzag", "distribution": "acme-zigzag", "summary": "Stages on a ring", "url": ""}


def text_of(*plugins: Any) -> str:
    return json.dumps({"v": 1, "plugins": plugins})


@contextmanager
def serving(content: bytes, status: int = 200, **headers: str) -> Iterator[str]:
    """The address of a server on the loopback interface that answers with ``content``."""

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Answer) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}/plugins.json"
        finally:
            server.shutdown()
            thread.join()


def search(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, list[str], str]:
    code = main(["plugins", "search", *words])
    out, err = capsys.readouterr()
    return code, out.splitlines(), err


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def unpublished(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalogue, "published_at", lambda: "")


def test_a_published_plugin_is_found_by_its_words(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(text_of(ZIGZAG).encode()) as address:
        code, lines, err = search(capsys, "RING", "schedule", "--from", address)
    assert code == 0
    assert [line.split() for line in lines] == [["schedule", "zigzag", "acme-zigzag", *["Stages", "on", "a", "ring"]]]
    assert "to install the first: pip install acme-zigzag" in err


def test_what_is_installed_is_marked_and_comes_last(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "plugins.json"
    gpipe = {**ZIGZAG, "name": "gpipe", "distribution": "megatron-run-schedule-gpipe", "summary": "All, gpipe"}
    file.write_text(text_of(gpipe, {**ZIGZAG, "summary": "like gpipe"}))
    _, lines, _ = search(capsys, "gpipe", "--from", str(file))
    assert [line.split()[1] for line in lines] == ["zigzag", "gpipe"]
    assert "installed 0.1.0  All, gpipe" in lines[1]
    _, lines, _ = search(capsys, "gpipe", "--from", str(file), "--json")
    assert [each["version"] for each in json.loads("\n".join(lines))] == ["", "0.1.0"]


@pytest.mark.parametrize("kind", ["nobody", "an error", "a file", "too long"])
def test_without_an_answer_it_says_so_in_a_line_and_lists_what_is_installed(
    kind: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    secret = tmp_path / "secret"
    secret.write_text(text_of({**ZIGZAG, "name": "gpipe"}))
    monkeypatch.setattr(catalogue, "LONGEST", 1000)
    servers = {
        "nobody": serving(b""),
        "an error": serving(b"", 404),
        "a file": serving(b"", 302, Location=secret.as_uri()),
        "too long": serving(b"x" * 2000),
    }
    with ExitStack() as stack:
        address = stack.enter_context(servers[kind])
        if kind == "nobody":
            stack.close()
        code, lines, err = search(capsys, "gpipe", "--from", address)
    assert code == 0
    assert [line.split()[:2] for line in lines] == [["schedule", "gpipe"]]
    (said,) = err.splitlines()
    assert said.startswith(f"megatron-run: the catalogue {address} cannot be had: ")
    assert said.endswith("; what follows is known to this version, or installed")


@pytest.mark.usefixtures("unpublished")
def test_where_none_is_published_it_knows_what_this_version_does(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of what is not installed, and how to have it."""
    says = "The GPipe pipeline schedule: all forwards, then all backwards."
    monkeypatch.setattr("megatron_run_cli.reports.listing.scan", lambda: Catalog(()))
    assert search(capsys, "gpipe") == (
        0,
        [f"schedule  gpipe  megatron-run-schedule-gpipe    {says}"],
        f"megatron-run: to install the first: {how_to_install('megatron-run-schedule-gpipe')}\n",
    )
    _, lines, _ = search(capsys, "checkpoint")
    found = {tuple(line.split()[:2]) for line in lines}
    assert found >= {("format", "distributed"), ("format", "megatron")}, "by what their packages say of themselves"


@pytest.mark.usefixtures("unpublished")
def test_what_the_engine_brings_is_found_by_what_it_says_of_itself(capsys: pytest.CaptureFixture[str]) -> None:
    code, lines, _ = search(capsys, "muon")
    assert [line.split()[:2] for line in lines] == [["optimizer", name] for name in ("adamw", "zero1", "zero3")]
    assert code == 0


def test_without_a_word_it_lists_everything(capsys: pytest.CaptureFixture[str]) -> None:
    code, lines, err = search(capsys)
    assert (code, err) == (0, "")
    found = {tuple(line.split()[:2]) for line in lines}
    assert {(each.kind, each.name) for each in scan().entries} <= found
    assert {(COMMAND, name) for name in KNOWN_COMMANDS} <= found


@pytest.mark.usefixtures("unpublished")
def test_the_list_of_a_checkout_has_those_by_others(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Whatever its lines are; in this checkout there are none yet."""
    monkeypatch.setattr(catalogue, "checkout", lambda: tmp_path)
    assert search(capsys, "acme")[:2] == (0, [])
    (tmp_path / "plugins").mkdir()
    file = tmp_path / "plugins" / "by-others.csv"
    right = "schedule,zigzag,acme-zigzag,https://acme.example/zigzag,Stages on a ring\n"
    file.write_text(f"kind,name,distribution,url,summary\n{right}schedule,acme\nschedule,x,; rm -rf acme,,\n")
    assert [line.split()[:3] for line in search(capsys, "acme")[1]] == [["schedule", "zigzag", "acme-zigzag"]]
    file.write_bytes(b"\xff\x00")
    assert search(capsys, "acme")[:2] == (0, [])


def test_the_address_is_that_of_the_distribution(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(text_of(ZIGZAG).encode()) as address:

        class Metadata:
            def get_all(self, name: str) -> list[str]:
                return ["Source, https://acme.example", f"Catalogue, {address}"] if name == "Project-URL" else []

        monkeypatch.setattr(catalogue, "metadata", lambda _: Metadata())
        _, lines, _ = search(capsys, "zigzag")
    assert len(lines) == 1


def test_foreign_text_is_escaped(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "plugins.json"
    file.write_text(text_of({**ZIGZAG, "summary": "on a ring\x1b[2J\nmegatron-run: type rm -rf ~"}))
    _, lines, err = search(capsys, "zigzag", "--from", str(file))
    assert len(lines) == 1
    assert "\x1b" not in lines[0] + err
    assert r"\x1b[2J\nmegatron-run" in lines[0]


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "[" * 100_000,
        '{"v": 2, "plugins": []}',
        text_of({**ZIGZAG, "distribution": "x; rm -rf ~"}),
        text_of({**ZIGZAG, "distribution": "--index-url=x"}),
        text_of({**ZIGZAG, "summary": "x" * 201}),
        text_of(*[ZIGZAG] * 10_001),
        '{"v": 1, "plugins": {}}',
    ],
)
def test_what_is_no_catalogue_is_refused_in_a_line(
    content: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "plugins.json"
    file.write_text(content)
    code, lines, err = search(capsys, "zigzag", "--from", str(file))
    assert (code, lines) == (5, [])
    assert err.count("\n") == 1
    assert f"{file} is no catalogue of plugins" in err


def test_a_file_that_is_missing_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, _, err = search(capsys, "zigzag", "--from", str(tmp_path / "none.json"))
    assert code == 5
    assert "cannot be read: No such file or directory" in err


def test_many_are_cut_and_counted(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "plugins.json"
    file.write_text(text_of(*({**ZIGZAG, "name": f"zigzag{index}"} for index in range(120))))
    _, lines, err = search(capsys, "zigzag", "--from", str(file))
    assert len(lines) == 100
    assert "and 20 more" in err
