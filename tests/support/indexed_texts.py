"""An indexed dataset of texts of bytes, for the sources that make samples of whole texts."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from megatron_run_engine.data.indexed_files import IndexedWriter


def write_texts(prefix: Path) -> Path:
    """Write 200 documents of 10 to 90 bytes, in which some bytes are likelier than others, and return ``prefix``."""
    generator = np.random.default_rng(0)
    with IndexedWriter(prefix, np.uint16) as writer:
        for _ in range(200):
            writer.add(97 + generator.integers(0, 26, generator.integers(10, 90)) ** 2 // 26)
            writer.end_document()
    return prefix
