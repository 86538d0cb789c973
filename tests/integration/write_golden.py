"""Write ``golden/tiny.json`` again, from one process with one thread."""

from __future__ import annotations

import json
from pathlib import Path

from tests.support.training import train

SETS = ("train.steps=20", "eval.interval=10", "eval.batches=2", "train.lr=1e-3")

if __name__ == "__main__":
    (seen,) = train(1, sets=SETS)
    golden = {"settings": list(SETS), "losses": seen.losses, "validation": seen.validation}
    target = Path(__file__).parent / "golden" / "tiny.json"
    target.write_text(json.dumps(golden, indent=1) + "\n", encoding="utf-8")
