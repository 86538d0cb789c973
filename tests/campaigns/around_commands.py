"""Every command where its streams are closed, full or unread, where its folder is gone, and over what is no file."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.campaigns.commands import COMMANDS, WRITERS, make_inputs
from tests.campaigns.figures import Figures, campaign, some
from tests.campaigns.written import Place, Ran
from tests.support.forked import forked_command

#: What a shell does with the streams and the folder of a command.
STREAMS: Mapping[str, str] = {
    "no standard output": "exec {} >&-",
    "no standard error": "exec {} 2>&-",
    "no output at all": "exec {} >&- 2>&-",
    "no stream at all": "exec {} <&- >&- 2>&-",
    "a full output": "exec {} > /dev/full",
    "a full standard error": "exec {} 2> /dev/full",
    "both full": "exec {} > /dev/full 2> /dev/full",
    "an unread output": "{} | true; exit ${{PIPESTATUS[0]}}",
    "a folder that is gone": 'mkdir gone && cd gone && rmdir "$PWD" && exec {}',
}


def streams(folder: Path, jobs: int, share: float) -> Figures:
    """Each command in each of these surroundings: what it always gives, or one line."""
    make_inputs(folder / "inputs")
    cases = [(command, name) for command in COMMANDS for name in STREAMS]

    def trial(index: int) -> Sequence[str]:
        command, name = cases[index]
        case = COMMANDS[command]
        place = Place(folder / str(index), case, folder / "inputs")
        shell = STREAMS[name].format('"$0" -P -m megatron_run_cli "$@"')
        ran = subprocess.run(
            ["/bin/bash", "-c", shell, sys.executable, *case.typed(command)],
            cwd=place.work,
            env={**os.environ, **place.variables},
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
        faults = Ran(ran.returncode, ran.stderr, 0).faults
        faults += ["it failed after its end"] if "Exception ignored" in ran.stderr else []
        if ran.returncode == 0:
            faults += [f"{output} is missing" for output in case.writes if not (place.work / output).exists()]
        shutil.rmtree(place.folder)
        return [f"{command}, {name}: {fault}" for fault in faults]

    what = "a command whose output is closed, full or unread, or whose folder is gone: its files, or one line"
    return campaign(what, trial, some(len(cases), share), jobs)


HELD = b"of the user"
#: What lies in the place of an output, beside a folder of the user's.
PLANTS: Mapping[str, Callable[[Path, Path], object]] = {
    "a link to a file": lambda path, home: path.symlink_to(home / "notes"),
    "a link to nothing": lambda path, home: path.symlink_to(home / "absent"),
    "a link to a folder": lambda path, home: path.symlink_to(home),
    "a link to itself": lambda path, _: path.symlink_to(path.name),
    "a pipe": lambda path, _: os.mkfifo(path),
    "a folder": lambda path, _: path.mkdir(),
    "a file": lambda path, _: path.write_bytes(HELD),
    "a device": lambda path, _: path.symlink_to("/dev/null"),
}


def special_files(folder: Path, jobs: int, share: float) -> Figures:
    """Something lies in the place of each output of each command: written, or refused in one line."""
    make_inputs(folder / "inputs")
    cases = [(name, output, plant) for name in WRITERS for output in COMMANDS[name].writes for plant in PLANTS]

    def trial(index: int) -> Sequence[str]:
        command, output, plant = cases[index]
        case = COMMANDS[command]
        place = Place(folder / str(index), case, folder / "inputs")
        home, path = place.folder / "home", place.work / output
        home.mkdir()
        (home / "notes").write_bytes(HELD)
        PLANTS[plant](path, home)
        with _read(path):
            ran = forked_command(case.typed(command), place.work, variables=place.variables, timeout=120)
        faults = Ran(ran.returncode, ran.stderr, 0).faults
        lines = [line for line in ran.stderr.splitlines() if line.startswith("megatron-run: ")]
        faults += [f"{len(lines)} lines: {lines}"] if ran.returncode and len(lines) != 1 else []
        faults += ["/dev/null is no device any more"] if not Path("/dev/null").is_char_device() else []
        if ran.returncode and (home / "notes").read_bytes() != HELD:
            faults.append("the user's file was changed, and the command failed")
        faults += [f"{left.name} is left" for left in home.glob(".*")]
        shutil.rmtree(place.folder)
        return [f"{command}, {output} is {plant}: {fault}" for fault in faults]

    what = "links, pipes, folders and devices in the place of an output: written as in a shell, or one line"
    return campaign(what, trial, some(len(cases), share), jobs)


@contextmanager
def _read(path: Path) -> Iterator[None]:
    """Within: ``path``, if it is a pipe, has a reader and room for a megabyte."""
    if not path.is_fifo():
        yield
        return
    handle = os.open(path, os.O_RDWR)
    try:
        fcntl.fcntl(handle, fcntl.F_SETPIPE_SZ, 1 << 20)
        yield
    finally:
        os.close(handle)


def around_commands(folder: Path, jobs: int, share: float) -> list[Figures]:
    """All of these."""
    return [streams(folder / "streams", jobs, share), special_files(folder / "special-files", jobs, share)]
