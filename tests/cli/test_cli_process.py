"""The program prepares its own process before anything in it loads torch, whichever command it runs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_run.files.user_cache import COMPILED
from megatron_run_engine.host.rank_environment import SPIN_BRIEFLY, available_cores
from tests.support.commands import COMMAND, world_of_two

#: In the place of torch: shows what it would find in the environment.
TORCH = "import json, os\nprint(json.dumps(dict(os.environ)), flush=True)\nos._exit(0)\n"
SET = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "TORCH_CPP_LOG_LEVEL", COMPILED)
COMMANDS = {
    "train": ("preset:tiny",),
    "generate": ("generate", "run", "text"),
    "eval": ("eval", "run", "--task", "perplexity=text.txt"),
    "import": ("import", ".", "new"),
    "export": ("export", "run", "new", "--to", "huggingface"),
    "finetune": ("finetune", ".", "--data", "text.txt"),
    "plugins check": ("plugins", "check", "optimizer=adamw"),
}


def environment_of_torch(folder: Path, words: tuple[str, ...], **variables: str) -> dict[str, str]:
    """What torch finds when ``words`` are run in ``folder``."""
    (folder / "stand-in").mkdir()
    (folder / "stand-in" / "torch.py").write_text(TORCH)
    (folder / "text.txt").write_text("some text\n")
    paths = os.pathsep.join([str(folder / "stand-in"), *filter(None, [os.environ.get("PYTHONPATH")])])
    clean = {name: text for name, text in os.environ.items() if name not in SET}
    done = subprocess.run(
        [*COMMAND, *words],
        cwd=folder,
        env={**clean, "PYTHONPATH": paths, "XDG_CACHE_HOME": str(folder / "cache"), **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found


#: The others load torch by the same ways, and the same program prepares each before it is read.
BY_DAY = ("train", "import", "plugins check")


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(words, id=name, marks=[pytest.mark.nightly] * (name not in BY_DAY))
        for name, words in COMMANDS.items()
    ],
)
def test_torch_finds_the_settings_of_a_local_rank(words: tuple[str, ...], tmp_path: Path) -> None:
    found = environment_of_torch(tmp_path, words)
    cores = str(available_cores())
    assert [found.get(name) for name in SET[:5]] == [cores, cores, None, SPIN_BRIEFLY, "ERROR"]
    assert found[COMPILED].startswith(str(tmp_path / "cache"))


def test_who_only_looks_for_torch_makes_no_folder(tmp_path: Path) -> None:
    code = """
import sys
from importlib.util import find_spec
from megatron_run_cli.__main__ import BeforeTorch

sys.meta_path.insert(0, BeforeTorch())
assert find_spec("torch").origin.endswith("torch/__init__.py")
assert "torch" not in sys.modules
"""
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert not list(tmp_path.iterdir())


#: Numbers of signals -> what a process prints that gets them while it loads torch, and its exit code.
WHILE_LOADED = {
    (signal.SIGINT,): ("loaded KeyboardInterrupt", 0),
    (signal.SIGTERM,): ("loaded Terminated", 0),
    (signal.SIGHUP,): ("loaded Terminated", 0),
    (signal.SIGINT, signal.SIGINT): ("", -signal.SIGINT),
    (signal.SIGINT, signal.SIGTERM): ("", -signal.SIGTERM),
}


@pytest.mark.parametrize("numbers", WHILE_LOADED)
def test_a_signal_while_torch_is_loaded_ends_the_command_afterwards_and_a_second_at_once(
    numbers: tuple[signal.Signals, ...], tmp_path: Path
) -> None:
    """torch hides the first where it looks for NumPy, which is then broken."""
    (tmp_path / "torch.py").write_text(f"""
import os
try:
    for number in {[*map(int, numbers)]}:
        os.kill(os.getpid(), number)
    print("loaded")
except BaseException:
    print("hidden")
""")
    code = """
import sys
from megatron_run_cli.__main__ import BeforeTorch
from megatron_run_cli.termination import ending_in_order

sys.meta_path.insert(0, BeforeTorch())
with ending_in_order():
    try:
        import torch
    except BaseException as error:
        print(type(error).__name__)
"""
    path = os.pathsep.join([str(tmp_path), *sys.path])
    environment = {**os.environ, "PYTHONPATH": path, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    command = ["env", "--default-signal=INT,TERM,HUP", sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (" ".join(done.stdout.split()), done.returncode) == WHILE_LOADED[numbers], done.stderr


def test_a_rank_of_torchrun_finds_them_too_and_more_ranks_than_cores_sleep_at_once(tmp_path: Path) -> None:
    ranks = available_cores() + 1
    place = world_of_two(0, 1, WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks))
    found = environment_of_torch(tmp_path, COMMANDS["train"], **place)
    assert [found.get(name) for name in SET[:4]] == ["1", "1", "passive", None]


def test_what_the_user_has_set_stays(tmp_path: Path) -> None:
    chosen = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "active", "TORCH_CPP_LOG_LEVEL": "INFO"}
    found = environment_of_torch(tmp_path, COMMANDS["generate"], **chosen)
    assert {name: found[name] for name in chosen} == chosen
    assert "GOMP_SPINCOUNT" not in found


def test_a_program_that_imports_the_engine_keeps_its_environment(tmp_path: Path) -> None:
    code = "import os; before = dict(os.environ); import megatron_run_inference; assert before == dict(os.environ)"
    clean = {name: text for name, text in os.environ.items() if name not in SET}
    done = subprocess.run([sys.executable, "-c", code], env=clean, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
