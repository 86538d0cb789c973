"""The job files parse, and the options they pass are options."""

from __future__ import annotations

import subprocess

import click
from ruamel.yaml import YAML

from megatron_run_cli.train import train
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


def test_the_kubernetes_file_starts_as_many_agents_as_it_has_pods() -> None:
    service, job = YAML(typ="safe").load_all((JOBS / "kubernetes.yaml").read_text())
    pods = job["spec"]["template"]["spec"]
    (container,) = pods["containers"]
    words = container["args"][0].split()
    value = {word: words[index + 1] for index, word in enumerate(words[:-1])}
    assert int(value["--nnodes"]) == job["spec"]["completions"] == job["spec"]["parallelism"]
    assert int(value["--nproc-per-node"]) == container["resources"]["limits"]["nvidia.com/gpu"]
    assert value["--master-addr"] == f"{job['metadata']['name']}-0.{service['metadata']['name']}"
    assert pods["subdomain"] == service["metadata"]["name"]
    assert set(options_of(words[words.index("megatron_run_cli") :])) <= known_options()
