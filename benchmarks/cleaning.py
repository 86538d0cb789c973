"""The planted near duplicates that `data clean` removes, beside the theory of locality-sensitive hashing.

    python -m benchmarks.cleaning [--quick] > benchmarks/results/cleaning.md

Pairs of documents have a known Jaccard similarity. The theory says how many share a band of their signatures; those
that do are compared exactly, and go from the rule's similarity on.
"""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.support.command import run
from benchmarks.support.report import table
from megatron_run_data_indexed.preparation.document_rules import Rules
from megatron_run_data_indexed.preparation.near_duplicates import BANDS, HASHES, SHINGLE, Duplicates, shingles

#: Shingles of a document. A similarity is the nearest that two such documents can have.
SIZE = 400
SIMILARITIES = tuple(percent / 100 for percent in range(50, 100, 5))


def planted(similarity: float, mark: str) -> tuple[str, str, float]:
    """Two documents, the end of one rewritten, and their similarity: (N - m) / (N + m) for m rewritten words of N."""
    rewritten = round(SIZE * (1 - similarity) / (1 + similarity))
    words = [f"{mark}x{number}" for number in range(SIZE + SHINGLE - 1)]
    others = [f"{mark}y{number}" for number in range(rewritten)]
    exact = (SIZE - rewritten) / (SIZE + rewritten)
    return " ".join(words), " ".join([*words[: len(words) - rewritten], *others]), exact


def found(pairs: list[tuple[str, str, float]], similarity: float) -> int:
    """How many second documents of ``pairs`` are found to be like their first, at ``similarity`` or above."""
    with Duplicates(similarity) as index:
        index.add([(str(number), hashes) for number, hashes in enumerate(shingles([pair[0] for pair in pairs]))])
        matches = index.add([("", hashes) for hashes in shingles([pair[1] for pair in pairs])])
    return sum(match is not None and match[0] == str(number) for number, match in enumerate(matches))


def report(*, quick: bool) -> Iterator[str]:
    """The shares that are found, and what follows for a corpus with as many pairs of each similarity."""
    count, rule = (200 if quick else 5000), Rules().similarity or 1.0
    yield f"\n{count} pairs of each similarity, {SHINGLE}-word shingles, {HASHES} hashes in {BANDS} bands.\n"
    rows, shared, removed, right = [], 0, 0, 0
    for similarity in SIMILARITIES:
        pairs = [planted(similarity, f"s{round(100 * similarity)}n{number}") for number in range(count)]
        exact = pairs[0][2]
        banded, gone = found(pairs, 1e-9), found(pairs, rule)
        theory = 1 - (1 - exact ** (HASHES // BANDS)) ** BANDS
        rows.append((f"{exact:.3f}", *(f"{100 * share:.2f}%" for share in (banded / count, theory, gone / count))))
        shared, removed = shared + banded, removed + gone
        right += count * (exact >= rule)
        if exact < rule and gone:
            raise ValueError(f"{gone} pairs of similarity {exact} are gone")
    yield from table(("similarity", "share a band", "theory", f"removed at {rule}"), rows)
    yield f"\nOf the pairs from {rule} on, {100 * removed / right:.2f}% are removed (recall)."
    yield f"All removed pairs are from {rule} on (precision); of those in a band, {100 * right / shared:.1f}% are."


if __name__ == "__main__":
    run("cleaning", "Near duplicates", __doc__ or "", report)
