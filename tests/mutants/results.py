"""What became of the mutants, as a page that partial runs bring up to date row by row."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.mutants.catalogue import Mutant
from tests.mutants.trial import Result

RESULTS = Path(__file__).parent / "RESULTS.md"
_LEAST = 0.9
_HEAD = ("mutant", "module", "what it breaks", "outcome", "by", "s")


@dataclass
class Results:
    """The newest result of each mutant that was tried, by its id."""

    of: dict[str, Result] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> Results:
        """What the page at ``path`` says; nothing where there is none."""
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        found = cls()
        for cells in ([cell.strip() for cell in line.strip("| ").split(" | ")] for line in lines if "`" in line):
            if len(cells) == len(_HEAD):
                name, _, _, outcome, by, seconds = cells
                found.of[name.strip("`")] = Result(outcome, by, float(seconds))  # type: ignore[arg-type]  # as written
        return found

    def add(self, mutant: Mutant, result: Result) -> None:
        """Take in what a trial of ``mutant`` ended with."""
        self.of[mutant.id] = result._replace(by=result.by.replace("|", "/"))

    def write(self, path: Path, mutants: Sequence[Mutant]) -> None:
        """Write the page: rows of ``mutants`` in their order, then why survivors survive."""
        tried = [mutant for mutant in mutants if mutant.id in self.of]
        explained = [f"- `{mutant.id}`: {mutant.survives}" for mutant in tried if mutant.survives]
        lines = [
            "# Mutants",
            "",
            f"`make mutants` wrote this. {self.summary(tried)}, of {len(mutants)} in the lists.",
            "",
            f"| {' | '.join(_HEAD)} |",
            f"|{'---|' * len(_HEAD)}",
            *(row(mutant, self.of[mutant.id]) for mutant in tried),
            *(["", "No test can notice these:", "", *explained] if explained else []),
        ]
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")

    def summary(self, mutants: Sequence[Mutant]) -> str:
        """How many of ``mutants`` ended how."""
        outcomes = [self.of[mutant.id].outcome for mutant in mutants]
        counts = [f"{outcomes.count(each)} {each}" for each in ("killed", "survived", "no answer")]
        return f"{len(outcomes)} tried: {', '.join(counts)}"

    def verdict(self, mutants: Sequence[Mutant]) -> int:
        """The exit code for ``mutants``, which were tried; says on stderr what is wrong."""
        killed = [mutant for mutant in mutants if self.of[mutant.id].outcome == "killed"]
        wrong = [
            f"{mutant.id}: {self.of[mutant.id].outcome}; {mutant.breaks}"
            for mutant in mutants
            if mutant not in killed and not mutant.survives
        ]
        wrong += [f"{mutant.id} is killed, though it is said to survive" for mutant in killed if mutant.survives]
        print("\n".join([*wrong, self.summary(mutants)]), file=sys.stderr)
        return 1 if wrong or len(killed) < _LEAST * len(mutants) else 0


def row(mutant: Mutant, result: Result) -> str:
    """A line of the table."""
    cells = (f"`{mutant.id}`", mutant.module, mutant.breaks.replace("|", "/"), result.outcome, result.by)
    return f"| {' | '.join(cells)} | {result.seconds:.0f} |"
