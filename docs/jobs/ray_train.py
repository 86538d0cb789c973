"""Ray Train starts the ranks, and again with as many as there are: ``python ray_train.py run.yaml /runs/first``.

Needs ``pip install 'ray[train]'``, megatron-run on every node, and a folder that all nodes mount.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer


def train_rank(asked: dict[str, Any]) -> None:
    """Run the command as one rank of the world that Ray has made, whose port is Ray's own: the run takes the next."""
    port = int(os.environ["MASTER_PORT"]) + 1
    sets = ("run.elastic=data", f"run.folder={asked['folder']}")
    words = ["-m", "megatron_run_cli", asked["config"], *(part for each in sets for part in ("--set", each))]
    subprocess.run([sys.executable, *words], env={**os.environ, "MASTER_PORT": str(port)}, check=True)


if __name__ == "__main__":
    config, folder = map(os.path.abspath, sys.argv[1:])
    TorchTrainer(
        train_rank,
        train_loop_config={"config": config, "folder": folder},
        scaling_config=ScalingConfig(num_workers=(1, 16), use_gpu=True),
        run_config=RunConfig(failure_config=FailureConfig(max_failures=20)),
    ).fit()
