"""Attacks on a run from outside: run folders that were prepared, launchers killed at their start, floods of the hub."""

from __future__ import annotations

import json
import os
import random
import shutil
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from megatron_run.config.request import Request
from megatron_run.planning import load_config
from megatron_run_engine.data.tokenizer_folder.record import DECIDING
from megatron_run_engine.data.tokenizer_training import train_tokenizer
from megatron_run_engine.launch.watchdog.connection import Connection, join_hub
from megatron_run_engine.launch.watchdog.hub import Hub
from tests.campaigns.figures import Figures, campaign, some
from tests.support.forked import Ran, run_forked, tiny
from tests.support.processes import wait_until
from tests.support.start_windows import changes_of, goes_on_after

#: What somebody puts in the place of a file, beside a folder of the user's.
PLANTS: dict[str, Callable[[Path, Path], object]] = {
    "a link to a file": lambda path, home: path.symlink_to(home / "notes"),
    "a link to nothing": lambda path, home: path.symlink_to(home / "absent"),
    "a link to a folder": lambda path, home: path.symlink_to(home),
    "a pipe": lambda path, home: os.mkfifo(path),
    "a folder": lambda path, home: path.mkdir(),
    "nothing in it": lambda path, home: path.touch(),
    "garbage": lambda path, home: path.write_bytes(b"\xff{" * 50),
    "deep JSON": lambda path, home: path.write_bytes(b"[" * 100_000),
    "a hole of 40 GB": lambda path, home: _hole(path),
}
NOTES = b"mine\nhalf a line"


def _hole(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(40 << 30)


def _texts(folder: Path) -> dict[str, object]:
    """Texts and the folder of a tokenizer with a chat template, so that a run keeps its files; the keys that say so."""
    (folder / "tokenizer").mkdir(parents=True)
    text = "the cat sat on a mat, and 12 dogs ran home.\n"
    (folder / "a.txt").write_text(text * 200)
    train_tokenizer([text] * 20, "bpe", 300, folder / "tokenizer" / "tokenizer.json")
    (folder / "tokenizer" / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    return {
        "data.use": "text",
        "data.paths": [str(folder / "a.txt")],
        "data.tokenizer": str(folder / "tokenizer"),
    }


def prepared(folder: Path, share: float = 1.0) -> Figures:
    """A second attempt in a folder of which one entry was replaced: it trains or says why not in one line."""
    base = folder / "base"
    values: dict[str, Any] = {
        "train.steps": 4,
        "checkpoint.interval": 2,
        "observer.use": "console,jsonl,tensorboard,trace",
    }
    values |= _texts(folder / "texts")

    def trained(run: Path, **asked: Any) -> Ran:
        given = {key: value for key, value in tiny(run, values).values.items() if key != "data.vocab_size"}
        return run_forked(Request(("preset:tiny",), values=given | asked.pop("more", {}), **asked), timeout=180.0)

    ran = trained(base)
    assert ran.code == 0, ran.message
    found = sorted(str(path.relative_to(base)) for path in base.rglob("*"))
    kept = [name for name in (*DECIDING, ".tokenizer.json.part", "tokenizer.json.lock") if name not in found]
    names = [*found, *kept, *("logs/attempt-002", "logs/attempt-002/config.yaml", "logs/attempt-002/rank-00000.log")]
    cases = [(name, plant) for name in names for plant in PLANTS]

    def trial(index: int) -> Sequence[str]:
        name, plant = cases[index]
        run, home = folder / str(index) / "run", folder / str(index) / "home"
        shutil.copytree(base, run)
        home.mkdir()
        (home / "notes").write_bytes(NOTES)
        place = run / name
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(place) if place.is_dir() else place.unlink(missing_ok=True)
        PLANTS[plant](place, home)
        ended = trained(run, more={"train.steps": 6}, extend=True)
        faults = [] if ended.code in (0, 2, 5) else [f"exit code {ended.code}: {ended.message}"]
        faults += ["several lines"] if "\n" in ended.message else []
        kept = {path.name: path.read_bytes() for path in home.iterdir()}
        faults += [] if kept == {"notes": NOTES} else [f"outside of the run folder lies {kept}"]
        shutil.rmtree(folder / str(index))
        return [f"{name} is {plant}: {each}" for each in faults]

    what = "a run in a folder that somebody has prepared: trained, or refused in one line; nothing outside changed"
    return campaign(what, trial, some(len(cases), share))


def starts(folder: Path, share: float = 1.0) -> Figures:
    """The launcher is killed before each change that it makes to the disk at its start; the same command goes on."""
    home = folder / "run"
    run = load_config("preset:tiny", sets={"run.folder": home})
    cases = [(attempts, at) for attempts in (0, 1) for at in range(changes_of(run, home, attempts))]

    def trial(index: int) -> Sequence[str]:
        attempts, at = cases[index]
        return [] if goes_on_after(at, run, home, attempts) else [f"after {attempts} attempts, change {at}"]

    what = "a launcher killed before each change of its start: the same command goes on"
    return campaign(what, trial, some(len(cases), share))


def floods(count: int, seed: int) -> Figures:
    """Strangers who send what they like to a hub of two ranks, which then still hears its sidecars."""

    def trial(number: int) -> Sequence[str]:
        dice = random.Random(number)
        hub = Hub(2, 5.0, "of this run", "127.0.0.1")
        hub.start()
        sidecars: list[Connection] = []
        strangers: list[socket.socket] = []
        try:
            for rank in range(2):
                sidecars.append(Connection(socket.create_connection(("127.0.0.1", hub.port))))
                assert join_hub(sidecars[-1], rank, "of this run", 10.0)
            for _ in range(dice.randrange(1, 40)):
                strangers.append(socket.create_connection(("127.0.0.1", hub.port)))
                with suppress(OSError):
                    strangers[-1].sendall(_noise(dice))
            sidecars[0].send(over=4)
            wait_until(lambda: bool(hub._verdict))
            told = hub._verdict["rank"]
        finally:
            hub.finish(5.0)
            for sidecar in sidecars:
                sidecar.close()
            for stranger in strangers:
                stranger.close()
        return [*([hub.failure] if hub.failure else []), *([] if told == 0 else [f"rank {told} was blamed"])]

    return campaign("strangers at the hub: the ranks are heard, and nobody else", trial, range(seed, seed + count))


def _noise(dice: random.Random) -> bytes:
    words = (b'{"rank": 1, "word": "", "proof": ""}', b'{"over": 1}', b'{"gone": "x"}', b"[" * 600, b'{"rank": 1e999}')
    lines = [
        dice.choice((*words, dice.randbytes(dice.randrange(700)), b'{"quiet": 99, "stopped": 9}')) for _ in range(5)
    ]
    return b"\n".join(lines) + b"\n"
