"""The reports of ``megatron-run checkpoint`` on saved steps, as data and as text."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from megatron_run.contracts.optimizer import MASTER
from megatron_run.contracts.scaler import scale_text
from megatron_run.errors import CheckpointError
from megatron_run.errors.wording import printable
from megatron_run_engine.checkpoint.files import size_text
from megatron_run_engine.checkpoint.manifest import Manifest
from megatron_run_engine.checkpoint.step_folder import Checkpoints, check_length, verify_files


@dataclass(frozen=True)
class Finding:
    """The result of checking one step. ``problem`` is empty, or the error in one line."""

    step: int
    manifest: Manifest | None
    problem: str = ""
    seconds: float = 0.0

    @property
    def record(self) -> dict[str, Any]:
        """Return JSON data, without the manifest's part if the manifest cannot be read."""
        found: dict[str, Any] = {"step": self.step, "ok": not self.problem, "problem": self.problem}
        if self.manifest is not None:
            about = self.manifest.about
            found |= {"bytes": self.manifest.size, "files": len(self.manifest.files), "time": about.time}
            found |= {"counters": dict(about.counters), "topology": dict(about.topology)}
        return found


def check(checkpoints: Checkpoints, steps: Sequence[int] = (), *, thorough: bool = False) -> Iterator[Finding]:
    """Check ``steps``, or all if empty: manifests and lengths, and with ``thorough`` every byte.

    A step that is removed meanwhile, by a training that keeps the newest, is left out. Raises :class:`CheckpointError`
    for one of ``steps`` that was never saved or is gone, which is no damage.
    """
    for step in steps:
        checkpoints.find(step)
    for step in steps or checkpoints.steps():
        start, manifest, problem = time.perf_counter(), None, ""
        try:
            manifest = checkpoints.manifest(step)
            for name in manifest.files:
                check_length(checkpoints.folder(step), name, manifest)
            if thorough:
                verify_files(checkpoints.folder(step), manifest, manifest.files)
        except CheckpointError as error:
            problem = str(error)
            if not checkpoints.folder(step).exists():
                if step in steps:
                    raise
                continue
        yield Finding(step, manifest, problem, time.perf_counter() - start)


def list_rows(findings: Sequence[Finding], hint: int | None) -> list[tuple[str, ...]]:
    """Return one row per step: name, state, size, time, ranks, whether it is ``hint``, and the problem."""
    rows: list[tuple[str, ...]] = []
    for finding in findings:
        mark = "latest" if finding.step == hint else ""
        state = "damaged" if finding.problem else "whole"
        rows.append((f"step{finding.step}", state, *_facts(finding.manifest), mark, finding.problem))
    return rows


def _facts(manifest: Manifest | None) -> tuple[str, str, str]:
    if manifest is None:
        return "", "", ""
    world = manifest.about.topology.get("world", 1)
    return size_text(manifest.size), manifest.about.time, f"{world} rank{'s' if world > 1 else ''}"


def verify_text(finding: Finding) -> str:
    """Return one line: how much was read and found intact, or what is damaged."""
    if finding.problem or finding.manifest is None:
        return f"step{finding.step}  damaged: {finding.problem}"
    files = len(finding.manifest.files)
    read = f"{files} file{'s' if files > 1 else ''}, {size_text(finding.manifest.size)}"
    return f"step{finding.step}  intact: {read} in {finding.seconds:.1f} s"


def inspect_text(manifest: Manifest) -> str:
    """Describe a step: time, counters, plugins and topology, then one row per file and one per logical tensor."""
    about = manifest.about
    lines = [f"step {about.step} of run {about.run}, saved {about.time}", ""]
    lines += _section("counters", about.counters.items())
    lines += _section("scaler", [(name, scale_text(number)) for name, number in about.scaler.items()])
    lines += _section("data", [("samples", about.data.samples), ("sha256", about.data.sha256)])
    lines += _section("topology", about.topology.items())
    lines += _section("versions", about.versions.items())
    chosen = [
        (kind, f"{each.name}  {each.source}, state version {each.state_version}")
        for kind, plugins in about.plugins.items()
        for each in plugins
    ]
    lines += _section("plugins", chosen)
    lines += _section("files", [(name, size_text(file.bytes)) for name, file in sorted(manifest.files.items())])
    lines += _section("tensors", [(name, _tensor_text(manifest, name)) for name in sorted(manifest.tensors)])
    return "\n".join(map(printable, lines[:-1]))  # names and texts are whoever's wrote the step


def _tensor_text(manifest: Manifest, name: str) -> str:
    """Return ``[64, 32]  master F32, exp_avg F32, step F32 []``: masters first, and shapes that differ."""
    fields = manifest.tensors[name]
    shape = max((record.shape for record in fields.values()), key=prod)
    texts = [
        f"{field} {record.dtype}" + (f" {list(record.shape)}" if record.shape != shape else "")
        for field, record in sorted(fields.items(), key=lambda each: (each[0] != MASTER, each[0]))
    ]
    return f"{list(shape)}  {', '.join(texts)}"


def _section(title: str, rows: Any) -> list[str]:
    """Return a title, its rows with aligned values, and an empty line; nothing without rows."""
    pairs = [(str(name), str(value)) for name, value in rows]
    width = max((len(name) for name, _ in pairs), default=0)
    return [title, *(f"  {name:{width}}  {value}" for name, value in pairs), ""] if pairs else []
