"""Run folders made by hand, as small as those who read them need."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron_run_testing.observer import example_step

CONFIG = """
train: {steps: 8, lr: 0.001}
parallel: {pipeline: 2, chunks: 2}
schedule: {use: interleaved}
model: {use: gpt, num_layers: 4}
data: {use: text, paths: [a.txt, b.txt]}
"""
RANKS = [
    {"rank": each, "stage": each, "tensor": 0, "data": 0, "layers_text": f"{each} | {each + 2}"} for each in (0, 1)
]
TOPOLOGY = {
    "world": 2, "tensor": 1, "pipeline": 2, "chunks": 2, "data": 1, "expert": 1,
    "ranks": RANKS,
}  # fmt: skip


def write_lines(file: Path, rows: Iterable[Any]) -> None:
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def step_row(step: int, **numbers: Any) -> dict[str, Any]:
    """A line of metrics.jsonl."""
    row = {"v": 1, "attempt": 1, **asdict(example_step(step)), **numbers}
    return {"v": row.pop("v"), "step": row.pop("step"), **row}


def make_run(folder: Path, *, lr: float = 1e-3, steps: int = 8) -> Path:
    """A finished run of two pipeline stages with an evaluation, a sample and a log."""
    (folder / "logs" / "attempt-001").mkdir(parents=True)
    write_lines(folder / "metrics.jsonl", [step_row(step, loss=4.0 / step, lr=lr) for step in range(1, steps + 1)])
    evaluations = [(4, 1.5), (8, 1.25)]
    rows = [{"step": step, "split": "validation", "loss": loss, "perplexity": 4.0} for step, loss in evaluations]
    write_lines(folder / "eval.jsonl", rows)
    write_lines(folder / "samples.jsonl", [{"step": 8, "attempt": 1, "text": "once upon a time"}])
    status = {"state": "finished", "step": steps, "attempt": 1, "heartbeat": 1.7e9, "exit_code": 0, "retry": False}
    write_record(folder, "status", {**status, "message": ""})
    attempt = {"attempt": 1, "time": "2026-01-02T03:04:05+0000", "arguments": ["my run.yaml"], "host": "h", "step": 0}
    write_record(folder, "run", {"id": "0" * 32, "attempts": [attempt]})
    plans = [{"microbatches": 4, "bubble": 0.125, "peak_in_flight": [5, 3]}]
    plugins = {"schedule": [{"name": "interleaved", "distribution": "d", "version": "1"}]}
    write_record(folder, "plan", {"v": 1, "topology": TOPOLOGY, "plans": plans, "plugins": plugins, "notices": []})
    write_record(folder, "environment", {"v": 1, "host": "h", "python": "3.11.7 (main)", "packages": {"torch": "2.9"}})
    write_record(folder, "device", {"v": 1, "name": "a processor", "precision": "fp32", "peak_tflops": None})
    (folder / "config.yaml").write_text(CONFIG.replace("0.001", str(lr)))
    (folder / "logs" / "attempt-001" / "rank-00000.log").write_text(
        f"step 1/8  loss 4.0\nobserver obs failed\nstep {steps}  saved 1 MB\n"
    )
    return folder


def write_record(folder: Path, name: str, content: Any) -> None:
    (folder / f"{name}.json").write_text(json.dumps(content))
