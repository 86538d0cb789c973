"""Launch scripts are translated without torch, which only checkpoints need."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import sys
sys.modules["torch"] = sys.modules["numpy"] = None  # an import of either raises
from megatron_run_cli.main import main
raise SystemExit(main(["config", "from-megatron", sys.argv[1]]))
"""


def test_a_script_is_translated_without_torch(tmp_path: Path) -> None:
    script = tmp_path / "train.sh"
    script.write_text("torchrun pretrain_gpt.py --num-layers 2 --hidden-size 32 --bf16\n")
    command = [sys.executable, "-c", PROGRAM, str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "  precision: bf16" in done.stdout
