"""``python -m megatron_run_cli``, which is also what torchrun starts."""

from __future__ import annotations

import sys

from megatron_run_cli.main import main

if __name__ == "__main__":
    sys.exit(main())
