"""The golden translations: what becomes of launch scripts written as people write them.

``python -m tests.plugins.format.megatron.golden_translations`` writes them anew; read the difference before it is kept.
"""

from __future__ import annotations

from pathlib import Path

from megatron_run_format_megatron.launch_script.translate import Translation, translate, yaml

GOLDEN = Path(__file__).parent / "golden"
SCRIPTS = sorted(GOLDEN.glob("*.sh"))


def translated(script: Path) -> tuple[Translation, str]:
    """What ``script`` becomes, and what ``config from-megatron`` writes and says of it, by line."""
    found = translate(script.read_text(encoding="utf-8"), script.name)
    lines = [f"   {line}" for line in (*found.remarks, *found.warnings)]
    said = "".join(f"#{line}\n" for line in ("", " On standard error:", *lines))
    return found, yaml(found, script.name) + said


if __name__ == "__main__":
    for each in SCRIPTS:
        each.with_suffix(".yaml").write_text(translated(each)[1], encoding="utf-8")
