"""A rank that torchrun or Slurm has started, and its sidecar: each ends with the other."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from megatron_run.contracts.activity import Activity
from megatron_run.errors import ExitCode, RankLostError
from megatron_run_engine.launch.watchdog.connection import Connection, Stranger
from megatron_run_engine.launch.watchdog.sidecar import reach_hub
from megatron_run_engine.launch.watchdog.sidecar_client import SidecarClient, own_address
from megatron_run_engine.run_folder import RunFolder
from megatron_run_engine.runtime.world import World
from tests.support.processes import alive, process_ids, wait_until

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(60)]

RANK = Path(__file__).with_name("rank_with_sidecar.py")


def ended(folder: Path, what: str) -> tuple[int, str, dict[str, object]]:
    """Exit code, last words and status of a rank that did so; its sidecar is gone soon after, and so are its files."""
    words = (sys.executable, str(RANK), str(folder), what)
    scratch = folder / "scratch"
    scratch.mkdir()
    environment = {**os.environ, "TMPDIR": str(scratch)}
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False, env=environment)
    (sidecar,) = process_ids(folder)
    wait_until(lambda: not alive(sidecar), seconds=5)
    assert not list(scratch.iterdir())
    return done.returncode, done.stderr, json.loads((folder / "status.json").read_text())


@pytest.mark.parametrize(("what", "named"), [("hang", "hangs"), ("stop", "is stopped by a signal (SIGSTOP)")])
def test_a_rank_that_hangs_or_is_stopped_ends_with_its_code_its_line_and_its_status(
    what: str, named: str, tmp_path: Path
) -> None:
    code, said, status = ended(tmp_path, what)
    assert code == 4
    (line,) = said.splitlines()
    assert line.startswith(f"megatron-run: rank 0 {named}: nothing new for ")
    assert " s in forward F0.0 of step 1; see the log of that rank" in line
    assert line.endswith(f" (log: {tmp_path}/logs/attempt-001/rank-00000.log)")
    assert (status["state"], status["exit_code"], status["retry"]) == ("failed", 4, True)
    assert f"megatron-run: {status['message']}" == line


def test_a_killed_rank_leaves_a_status_that_says_so_and_no_process(tmp_path: Path) -> None:
    code, said, status = ended(tmp_path, "kill")
    assert (code, said) == (-9, "")
    assert (status["state"], status["exit_code"]) == ("failed", 4)
    assert status["message"] == "rank 0 was lost: its process ended without a word in forward F0.0 of step 1"


def test_a_rank_that_holds_the_interpreter_lock_is_killed_and_its_status_says_where_it_was(tmp_path: Path) -> None:
    code, said, status = ended(tmp_path, "lock")
    assert (code, said, status["exit_code"]) == (-9, "", 4)
    assert str(status["message"]).startswith("rank 0 hangs: nothing new for ")
    assert " s in forward F0.0 of step 1; " in str(status["message"])


def test_a_rank_whose_hub_dies_ends_by_itself_with_the_code_of_a_lost_rank(tmp_path: Path) -> None:
    code, said, status = ended(tmp_path, "hubless")
    assert (code, said, status["exit_code"]) == (4, "", None)


def test_a_rank_does_not_obey_a_hub_that_cannot_prove_itself_and_says_so(tmp_path: Path) -> None:
    code, said, status = ended(tmp_path, "impostor")
    assert (code, status["exit_code"]) == (0, None)
    assert said.startswith("megatron-run: rank 1 is not compared with the others: who listens at 127.0.0.1:")


@pytest.mark.parametrize(
    ("found", "address"),
    [(["127.0.0.1"], "127.0.0.1"), (["127.0.0.1", "127.0.0.2"], ""), (["203.0.113.9"], ""), ([], "")],
)
def test_the_hub_listens_where_the_job_is_known_to_reach_this_host(
    monkeypatch: pytest.MonkeyPatch, found: list[str], address: str
) -> None:
    """One address, which is this host's own; a loopback address is of no use to other hosts."""

    def getaddrinfo(*_: object) -> list[tuple[int, int, int, str, tuple[str, int]]]:
        if not found:
            raise socket.gaierror
        return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (each, 0)) for each in found]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    assert own_address("first-host", loopback=True) == address
    assert own_address("first-host") == ""


def test_a_rank_that_ends_by_itself_takes_its_sidecar_with_it_and_keeps_its_status(tmp_path: Path) -> None:
    code, said, status = ended(tmp_path, "leave")
    assert (code, said, status["exit_code"]) == (0, "", None)


@pytest.mark.parametrize("evictions", [0, 2])
def test_a_sidecar_that_the_hub_sends_away_comes_again(evictions: int) -> None:
    """Once before it can prove itself, once after its proof."""
    found: list[int | None] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def hub() -> None:
            for number in range(evictions):
                away = server.accept()[0]
                if number:
                    Stranger(Connection(away))
                    away.recv(512)
                away.close()
            connection = Connection(server.accept()[0])
            stranger = Stranger(connection)
            while not found and connection.open:
                rank = stranger.identify(connection, "known to both", range(3))
                found.extend([] if rank is None else [rank])
            connection.close()

        thread = threading.Thread(target=hub, daemon=True)
        thread.start()
        reach_hub(server.getsockname(), 2, "known to both", 20.0).close()
        thread.join(10.0)
    assert found == [2]


def test_a_sidecar_that_is_always_sent_away_names_that_and_not_a_wrong_proof() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def hub() -> None:
            with suppress(OSError):
                while True:
                    server.accept()[0].close()

        thread = threading.Thread(target=hub, daemon=True)
        thread.start()
        with pytest.raises(ConnectionError, match="has sent it away again and again") as error:
            reach_hub(server.getsockname(), 2, "known to both", 0.5)
        server.shutdown(socket.SHUT_RDWR)
        thread.join()
    assert "is not the hub" not in str(error.value)


def test_where_ranks_are_left_out_the_hub_is_at_the_host_of_the_first_that_trains(tmp_path: Path) -> None:
    """All ranks of the host at which the world meets may stand by."""
    run = RunFolder(tmp_path, 1)
    run.start()
    run.files.make("logs/attempt-001")
    world = World(0, 3, 1, 2, init_method="tcp://host.invalid:1", launcher="torchrun", host="127.0.0.1", left_out=1)
    client = SidecarClient(world, run, 30.0, 2)
    client.start_hub()
    hub = json.loads((tmp_path / "logs/attempt-001/.hub").read_text())["hub"]
    client.close(ExitCode.DONE)
    client.join()
    client.forget_secret()
    assert hub.startswith("127.0.0.1:")


def test_a_hub_that_cannot_listen_is_a_lost_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_run_engine.launch.watchdog.sidecar_client._loopback", lambda: "192.0.2.1")
    client = client_of_one(tmp_path)
    with pytest.raises(RankLostError, match=r"nobody can watch the ranks: the hub cannot listen at 192\.0\.2\.1; see"):
        client.start_hub()
    client.close(ExitCode.RANK_LOST)
    client.join()


def test_a_sidecar_that_does_not_go_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_run_engine.launch.watchdog.sidecar_client._GONE_WITHIN", 0.1)
    client = client_of_one(tmp_path)
    client.start_hub()
    client.start(Activity())
    assert client._process is not None
    client._process.send_signal(signal.SIGSTOP)
    client.close(ExitCode.DONE)
    client.join()
    assert client._process.returncode == -signal.SIGKILL
    client.forget_secret()


def client_of_one(folder: Path) -> SidecarClient:
    """The sidecar of a run of one rank; it is not started."""
    run = RunFolder(folder, 1)
    run.start()
    run.files.make("logs/attempt-001")
    return SidecarClient(World(launcher="torchrun"), run, 30.0, 2)
