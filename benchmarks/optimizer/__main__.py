"""Compares the optimizers with torch's data parallelism and with DeepSpeed.

    python -m benchmarks.optimizer [--quick] [--only PART]

Prints the tables of ``results/optimizer.md``: the time of a step on two ranks with every optimizer, how much of the
communication is hidden, the goals beside what was measured, and the bytes of optimizer state beside their formula;
for a step that has much to compute, and for one that has much to send; and the time of Muon's step alone, beside
torch's and beside ranks that all do all of it.

Where DeepSpeed is installed (``DS_BUILD_OPS=0 pip install deepspeed``) it is one more side. A sample during which
something else used more than a twentieth of the cores is dropped. On two quiet cores this takes about ten minutes, and
``--quick``, with fewer samples, about four.
"""

from __future__ import annotations

from benchmarks.optimizer import muon, speed
from benchmarks.support.command import run

if __name__ == "__main__":
    run("optimizer", "Optimizers", __doc__ or "", {"steps": speed.report, "muon": muon.report})
