"""Where blocks of inputs begin and end."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from megatron_run_data_indexed.preparation import inputs
from megatron_run_data_indexed.preparation.inputs import find_inputs


def test_the_separator_of_documents_is_found_wherever_blocks_are_cut(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    for size in (5, 17, 64):
        texts = ["".join(generator.choice(list("ab<"), generator.integers(1, 40))) for _ in range(80)]
        path = tmp_path / "a.txt"
        path.write_text("<end>".join(texts))
        (found,), _ = find_inputs([str(path)])
        cuts = list(inputs.blocks([found], b"<end>", size))
        content = path.read_bytes()
        assert b"".join(content[cut.start : cut.stop] for cut in cuts) == content
        assert all(content[: cut.stop].endswith(b"<end>") for cut in cuts[:-1])
