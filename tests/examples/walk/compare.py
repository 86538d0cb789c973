"""The price of a schedule, from what ``megatron-run schedule show --json`` printed into the files that are named."""

import json
import sys
from pathlib import Path

for file in sys.argv[1:]:
    plan = json.loads(Path(file).read_text())
    held = [rank["peak_in_flight"] * len(rank["layers"][0]) for rank in plan["ranks"]]
    print(f"{file:16} bubble {plan['bubble_fraction']:.1%}  layers whose activations a stage holds: {held}")
