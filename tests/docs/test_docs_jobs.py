"""The job files parse, and the options they pass are options."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import click
import pytest
from ruamel.yaml import YAML

from megatron_run.config.request import Request
from megatron_run.planning import resolve
from megatron_run_cli.commands.train import train
from megatron_run_engine.run_folder import RunFolder
from megatron_run_engine.run_folder.excluded import Excluded, exclude
from tests.support.checkout import ROOT

JOBS = ROOT / "docs" / "jobs"


def options_of(words: list[str]) -> list[str]:
    return [word for word in words if word.startswith("--")]


def known_options() -> set[str]:
    return {name for option in train.params if isinstance(option, click.Option) for name in option.opts}


def test_the_slurm_script_is_a_script_and_passes_known_options() -> None:
    script = JOBS / "slurm.sh"
    subprocess.run(["bash", "-n", script], check=True)
    (line,) = (line for line in script.read_text().splitlines() if line.startswith("srun "))
    given = options_of(line.partition("megatron-run")[2].split())
    assert given
    assert set(given) <= known_options()


def slurm_script(folder: Path, code: int, restarts: int, excluded: str = "(null)") -> list[str]:
    """How the script calls Slurm's programs, for which others stand in; srun ends with ``code``.

    The job has ``excluded`` nodes of its own.
    """
    (folder / "venv/bin").mkdir(parents=True)
    (folder / "venv/bin/activate").write_text(f'PATH="{folder}:$PATH"\n')
    for name, ending in (("srun", code), ("scontrol", 0)):
        program = folder / name
        shown = f"echo '   ReqNodeList=(null) ExcNodeList={excluded}'" if name == "scontrol" else ""
        program.write_text(f'#!/bin/sh\necho {name} "$@" >> {folder}/calls\n{shown}\nexit {ending}\n')
        program.chmod(0o755)
    (folder / "python3").symlink_to(sys.executable)
    slurm = {"SLURM_SUBMIT_DIR": str(folder), "SLURM_JOB_ID": "7", "SLURM_CPUS_PER_TASK": "8"}
    variables = {
        **slurm,
        "SLURM_RESTART_COUNT": str(restarts),
        "ENVIRONMENT": str(folder / "venv"),
        "PATH": "/usr/bin:/bin",
    }
    done = subprocess.run(["bash", str(JOBS / "slurm.sh"), "run.yaml"], env=variables, check=False)
    assert done.returncode == code
    return (folder / "calls").read_text().splitlines()


@pytest.mark.parametrize(
    ("code", "restarts", "requeued"), [(0, 0, False), (143, 0, True), (4, 1, True), (2, 0, False), (143, 20, False)]
)
def test_the_slurm_script_asks_for_another_go_when_it_may_help(
    code: int, restarts: int, requeued: bool, tmp_path: Path
) -> None:
    started, *others = slurm_script(tmp_path, code, restarts)
    assert "--cpus-per-task=8" in started
    assert " megatron-run run.yaml --set run.elastic=data " in started
    assert started.endswith(f" --set run.folder={tmp_path}/runs/7")
    assert others == (["scontrol requeue 7"] if requeued else [])


@pytest.mark.parametrize(("code", "own", "added"), [(4, "(null)", ""), (4, "gpu[7-8]", "gpu[7-8],"), (2, "(null)", "")])
def test_the_slurm_script_leaves_out_the_hosts_of_excluded_ranks_once_its_job_waits(
    code: int, own: str, added: str, tmp_path: Path
) -> None:
    run = tmp_path / "runs/7"
    run.mkdir(parents=True)
    for host, place in (("gpu2", 3), ("gpu10.example.org", 0), ("gpu2", 1)):
        exclude(RunFolder(run, 1), [Excluded(host, place)])
    _, *others = slurm_script(tmp_path, code, 0, own)
    update = f"scontrol update JobId=7 ExcNodeList={added}gpu10,gpu2"
    assert others == (["scontrol requeue 7", "scontrol show job 7", update] if code == 4 else [])


def test_the_kubernetes_file_starts_as_many_agents_as_it_has_pods() -> None:
    service, job = YAML(typ="safe").load_all((JOBS / "kubernetes.yaml").read_text())
    pods = job["spec"]["template"]["spec"]
    (container,) = pods["containers"]
    words = container["args"][0].split()
    value = {word: words[index + 1] for index, word in enumerate(words[:-1])}
    least, most = map(int, value["--nnodes"].split(":"))
    assert least < most == job["spec"]["completions"] == job["spec"]["parallelism"]
    assert int(value["--nproc-per-node"]) == container["resources"]["limits"]["nvidia.com/gpu"]
    assert value["--rdzv-endpoint"] == f"{job['metadata']['name']}-0.{service['metadata']['name']}:29500"
    assert value["--rdzv-backend"] == "c10d"
    assert pods["subdomain"] == service["metadata"]["name"]
    assert set(options_of(words[words.index("megatron_run_cli") :])) <= known_options()
    assert pods["restartPolicy"] == "OnFailure"
    assert job["spec"]["backoffLimit"] > 0
    (within,) = (float(word.partition("=")[2]) for word in words if word.startswith("run.stop_within="))
    assert within < pods["terminationGracePeriodSeconds"]


def test_the_ray_file_compiles_and_starts_the_command_with_known_options() -> None:
    text = (JOBS / "ray_train.py").read_text()
    compile(text, "ray_train.py", "exec")
    assert set(re.findall(r"\"(--[a-z-]+)\"", text)) <= known_options()
    assert '"megatron_run_cli"' in text


def test_the_skypilot_file_is_yaml_whose_command_is_a_script_with_known_options() -> None:
    job = YAML(typ="safe").load((JOBS / "skypilot.yaml").read_text())
    subprocess.run(["bash", "-n", "-c", job["run"]], check=True)
    assert set(options_of(job["run"].partition("megatron_run_cli")[2].split())) <= known_options()
    assert job["num_nodes"] > 1
    assert any(f"run.folder={place}/" in job["run"] for place in job["file_mounts"])


@pytest.mark.parametrize("name", ["slurm.sh", "kubernetes.yaml", "ray_train.py", "skypilot.yaml"])
def test_the_keys_that_a_job_file_sets_resolve_and_make_it_elastic(name: str) -> None:
    text = (JOBS / name).read_text()
    sets = re.findall(r"\b(?:run|train|parallel|checkpoint)\.[a-z_]+=[\w/.]+", text)
    run = resolve(Request(("preset:tiny",), sets=tuple(sets), there=3))
    assert run.config.run.elastic == "data"
    assert run.sizes.world + run.spares == 3
