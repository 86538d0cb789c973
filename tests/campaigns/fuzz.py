"""Random changes of what is read: a configuration, a manifest, the header of a shard. An answer each time, soon."""

from __future__ import annotations

import hashlib
import random
import resource
import time
from collections.abc import Callable, Sequence
from importlib.resources import files
from pathlib import Path

from megatron_run.config.request import Request
from megatron_run.config.yaml import parse
from megatron_run.errors import RunError
from megatron_run.planning import resolve
from megatron_run_engine.checkpoint.manifest import MANIFEST, read_manifest
from megatron_run_engine.checkpoint.shard_file import read_header
from tests.campaigns.figures import Figures, campaign
from tests.support.saved_steps import random_state, save_alone

#: Seconds that an answer may take, and mebibytes that all answers together may need.
PROMPT, MEMORY = 3.0, 256.0
#: Bytes that mean something to one of the formats.
TELLING = [b"{", b"}", b"[", b"]", b'"', b":", b",", b"\n", b"- ", b"&a", b"*a", b"!!", b"0", b"-1", b"1e999", b"\xff"]
TELLING += [b"null", b"NaN", b"9" * 30, b"\\u0000", b"\0", b"..", b"/", b"\t", b"#", b"|", b">", b"%", b"@"]


def changed(draw: random.Random, content: bytes) -> bytes:
    """``content`` with a few changes: bytes replaced, left out, doubled, or something telling put in."""
    data = bytearray(content)
    for _ in range(draw.choice((1, 1, 2, 4, 16))):
        at = draw.randrange(len(data) + 1)
        end = min(len(data), at + draw.choice((1, 1, 4, 64)))
        how = draw.randrange(4)
        if how == 0:
            data[at:end] = draw.randbytes(end - at)
        elif how == 1:
            del data[at:end]
        elif how == 2:
            data[at:at] = data[at:end]
        else:
            data[at:at] = draw.choice(TELLING)
    return bytes(data)


def fuzz(what: str, content: bytes, read: Callable[[bytes], object], count: int, seed: int) -> Figures:
    """Let ``read`` have so many changes of ``content``: it may raise our errors, and nothing else."""
    slowest, before, taken = 0.0, _peak(), 0

    def trial(each: int) -> Sequence[str]:
        nonlocal slowest, taken
        data, start = changed(random.Random(each), content), time.monotonic()
        try:
            read(data)
            taken += 1
        except RunError as error:
            if not str(error).strip():
                return [f"seed {each}: an error that says nothing"]
        except Exception as error:
            return [f"seed {each}: {type(error).__name__}: {error}"]
        seconds = time.monotonic() - start
        slowest = max(slowest, seconds)
        return [f"seed {each}: it took {seconds:.1f} s"] if seconds > PROMPT else []

    figures = campaign(what, trial, range(seed, seed + count))
    grown = _peak() - before
    figures.notes += [f"{taken} were still right", f"the slowest took {slowest * 1e3:.0f} ms"]
    figures.notes.append(f"memory grew by {grown:.0f} MiB")
    if grown > MEMORY:
        figures.faults.append(f"memory grew by {grown:.0f} MiB")
    return figures


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def fuzz_all(folder: Path, count: int, seed: int) -> list[Figures]:
    """Each format, ``count`` changes each; whole configurations, which take longer, a tenth as many."""
    saved = save_alone(folder / "c", 1, random_state(1, tensors=2)).folder(1)
    preset = (files("megatron_run") / "presets" / "tiny.yaml").read_bytes()
    body = (saved / MANIFEST).read_bytes()
    body = body[len(b'{"manifest":') : body.rindex(b',\n"sha256"')]
    shard = (saved / "rank-00000.safetensors").read_bytes()
    length = 8 + int.from_bytes(shard[:8], "little")
    forged = folder / "forged"
    forged.mkdir()

    def manifest(data: bytes) -> object:
        digest = hashlib.sha256(data).hexdigest()
        (forged / MANIFEST).write_bytes(b'{"manifest":' + data + b',\n"sha256":"' + digest.encode() + b'"}\n')
        return read_manifest(forged)

    def begin(data: bytes) -> object:
        (forged / "shard").write_bytes(data + shard[length:])
        return read_header(forged / "shard")

    def header(data: bytes) -> object:
        return begin(len(data).to_bytes(8, "little") + data)

    def configuration(data: bytes) -> object:
        (forged / "run.yaml").write_bytes(data)
        return resolve(Request((str(forged / "run.yaml"),), environment={}))

    return [
        fuzz("YAML changed at random", preset, lambda data: parse(data.decode("latin-1"), "x.yaml"), count, seed),
        fuzz("a configuration changed at random, resolved", preset, configuration, count // 10, seed),
        fuzz("a manifest changed at random, its SHA-256 made right", body, manifest, count, seed),
        fuzz("the beginning of a shard changed at random", shard[:length], begin, count, seed),
        fuzz("a shard's header changed at random, its length made right", shard[8:length], header, count, seed),
    ]
