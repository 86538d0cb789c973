"""Compositions: what is drawn around a plugin, what they ask for, how a failure is made simple and told."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from megatron_run.config.request import Request
from megatron_run.errors import ExitCode, InputError
from megatron_run.registry.discover import Entry, scan
from megatron_run.registry.load import load
from megatron_run_testing.conformance.composition import campaign, check_composition
from megatron_run_testing.conformance.composition import compare as compare_module
from megatron_run_testing.conformance.composition import space as space_module
from megatron_run_testing.conformance.composition.attempts import WORLD, Job, in_rounds
from megatron_run_testing.conformance.composition.axes import LEARNED, Sizes
from megatron_run_testing.conformance.composition.compare import (
    TOLERANCES,
    Compared,
    Tolerances,
    compare,
    measured,
    refusal,
)
from megatron_run_testing.conformance.composition.space import Composition, Space
from tests.support.commands import COMMAND, run_command

EXAMPLES = Path(__file__).parents[1] / "examples" / "plugins"
#: An optimizer that clips by the norm of one rank's values: right on one rank, silently wrong on several.
WRONG = """
from torch import Tensor

from megatron_run.contracts import Optimizer, PluginInfo
from megatron_run.hookspecs import hookimpl
from megatron_run_engine.optim import FlatOptimizer, Replicated, UpdateOptions, check_update


class OwnNorm(FlatOptimizer):
    def clip_(self, max_norm: float) -> Tensor:
        norm = sum(grads.double().square().sum() for grads in self._counted).sqrt()
        for shard in self._shards:
            shard.grads.mul_((max_norm / norm).clamp(max=1.0) if max_norm else 1.0)
        return norm.float()[None]


@hookimpl
def megatron_run_plugin_info() -> PluginInfo:
    return PluginInfo("optimizer", "own-norm", options=UpdateOptions, check_config=check_update)


@hookimpl
def megatron_run_create_optimizer(context: object, options: UpdateOptions) -> Optimizer:
    return OwnNorm(context, options, Replicated)
"""


@pytest.fixture(scope="module")
def everything() -> Space:
    return Space.of_installed()


def test_every_option_of_every_axis_is_drawn_and_the_same_seed_draws_the_same(everything: Space) -> None:
    drawn = [everything.draw(random) for random in [Random(5)] for _ in range(900)]
    chosen = {choice for composition in drawn for choice in composition.choices}
    for axis in (*everything.learned, *everything.carried_out):
        assert {number for name, number in chosen if name == axis.name} == set(range(1, len(axis.options)))
    assert drawn[0] == everything.draw(Random(5))
    assert [axis.name for axis in everything.learned] == [axis.name for axis in LEARNED]


def test_the_single_process_learns_the_same_and_shares_nothing_of_how(everything: Space) -> None:
    composition = Composition((("ranks", 6), ("clip", 1), ("recompute", 1), ("then", 4), ("adapters", 1)), everything)
    assert composition.reference.nproc == 1
    assert "train.clip_norm=0" in composition.reference.sets
    assert "train.recompute=full" not in composition.reference.sets
    assert "parallel-layer=dense+lora,rank=2,alpha=4,targets=all" in composition.reference.plugins
    first, then = composition.attempts
    assert (first.nproc, then.nproc) == (4, 2)
    assert "parallel-layer=tensor+lora,rank=2,alpha=4,targets=all" in first.plugins
    assert all("train.recompute=full" in request.sets for request in (first, then))
    assert refusal(composition) == ""


def test_ranks_that_split_samples_have_the_layers_for_it_above_all_others(everything: Space) -> None:
    number = everything.splits.index(Sizes(tensor=2, context=2))
    composition = Composition((("ranks", number), ("pieces", 2), ("adapters", 1)), everything)
    (attempt,) = composition.attempts
    assert "parallel.context=2" in attempt.sets
    stack = "parallel-layer=tensor+lora+context,rank=2,alpha=4,targets=all,method=ulysses"
    assert stack in attempt.plugins
    assert refusal(composition) == ""
    dropping = replace(composition, choices=(("ranks", number), ("experts", 2)))
    assert dropping.attempts[0].nproc == 2, "an expert with a capacity drops other tokens of other pieces"


def test_without_layers_for_it_no_split_asks_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    catalog = scan()
    others = tuple(entry for entry in catalog.entries if str(entry) != "parallel-layer=context")
    monkeypatch.setattr(space_module, "scan", lambda: replace(catalog, entries=others))
    made = Space.of_installed()
    assert "pieces" not in made.axes
    assert {sizes.context for sizes in made.splits} == {1}


@pytest.mark.parametrize("network", [1, 2, 3, 4])
def test_a_network_gets_the_settings_that_it_has(network: int, everything: Space) -> None:
    """Of one that has other options, those of gpt are left out, not refused."""
    learned = {axis.name: axis for axis in LEARNED}
    plain = [(name, 1) for name in ("norm", "activation", "qk_norm", "scales")]
    composition = Composition((("ranks", 2), ("network", network), *plain[:2]), everything)
    assert refusal(composition) == ""
    assert any(each in composition.reference.plugins for each in learned["network"].options[network])


def test_runs_lie_side_by_side_and_no_rank_has_two() -> None:
    def job(home: str, *ranks: int) -> Job:
        return Job(home, [Request(nproc=count) for count in ranks])

    jobs = [job("a", 1), job("b", 4), job("c", 1), job("d", 2), job("e", 2, 1), job("f", 1, 2)]
    rounds = in_rounds(jobs)
    assert sorted(each.home for side in rounds for each in side) == ["a", "b", "c", "d", "e", "f"]
    assert len(rounds) == 3
    for side in rounds:
        taken = [rank for each in side for rank in range(each.rank, each.rank + each.width)]
        assert len(taken) == len(set(taken)) <= WORLD
        assert max(taken) < WORLD
        assert len({len(each.attempts) for each in side}) == 1


@pytest.mark.parametrize(
    ("kind", "said", "alone"),
    [
        ("schedule", "schedule", False),
        ("scaler", "scaler", True),
        ("optimizer", "optimizer", True),
        ("parallel_layer", "parallel-layer=dense+", True),
        ("graph_capture", "graph-capture", False),
        ("data", "data", True),
    ],
)
def test_every_composition_around_a_plugin_has_it(kind: str, said: str, alone: bool, everything: Space) -> None:
    file = EXAMPLES / f"{kind}.py"
    plugin = load(Entry("", file.stem, str(file), location=str(file)), "a test")
    space, random = everything.around(plugin), Random(3)
    for _ in range(20):
        composition = space.draw(random)
        assert any(str(file) in word for word in composition.attempts[0].plugins)
        reference = [word for word in composition.reference.plugins if str(file) in word]
        assert bool(reference) == alone, "the single process has what decides what is learned"
        assert all(word.startswith(said) for word in reference)


def test_what_has_no_part_in_a_training_is_not_composed() -> None:
    for target, why in {"observer=jsonl": "kind observer", "format=huggingface": "kind format"}.items():
        with pytest.raises(InputError, match="has nothing to compose") as refused:
            check_composition(target)
        assert why in refused.value.why
    with pytest.raises(InputError, match="offers no installed plugin"):
        check_composition("megatron-run-schedule-nowhere")


def wrong_with(needed: set[tuple[str, int]], seen: list[int]) -> object:
    def found(compositions: list[Composition]) -> list[Compared]:
        seen.append(len(compositions))
        faults = (needed <= set(each.choices) and each.sizes.tensor > 1 for each in compositions)
        return [Compared(fault="both" if fault else "") for fault in faults]

    return found


@pytest.mark.parametrize("needed", [set(), {("recompute", 2)}, {("recompute", 2), ("save", 1), ("norm", 1)}])
def test_a_failure_is_made_simple(
    needed: set[tuple[str, int]], everything: Space, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(campaign, "compare", wrong_with(needed, []))
    choices = (("ranks", 6), ("norm", 1), ("recompute", 2), ("save", 1), ("eval", 1))
    simple, compared = campaign.simplest(Composition(choices, everything), Compared(fault="both"))
    assert dict(simple.choices) == {"ranks": 1, **dict(needed)}, "two tensor-parallel ranks, and what is needed"
    assert compared.fault == "both"


def test_what_contains_a_simple_failure_is_not_made_simple_again(
    everything: Space, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = list[int]()
    monkeypatch.setattr(campaign, "compare", wrong_with({("recompute", 2)}, seen))
    both = [Composition((("ranks", ranks), ("recompute", 2), ("eval", 1)), everything) for ranks in (1, 6)]
    found = campaign._simplest_of([(each, Compared(fault="both")) for each in both], lambda _: None)
    assert [dict(each.choices) for each, _ in found] == [{"ranks": 1, "recompute": 2}]


def test_where_all_is_refused_the_reason_is_told(tmp_path: Path, everything: Space) -> None:
    file = tmp_path / "needy.py"
    source = (EXAMPLES / "scaler.py").read_text()
    file.write_text(source.replace("options=", 'requires=frozenset({"no-such-thing"}), options=', 1))
    with pytest.raises(InputError, match="nothing to compare") as refused:
        check_composition(f"scaler={file}", count=1)
    assert "no-such-thing" in refused.value.why


def test_what_is_typed_plans_the_same_run(everything: Space, tmp_path: Path) -> None:
    composition = Composition((("ranks", 6), ("recompute", 1), ("then", 4)), everything)
    alone, first, then = composition.commands(str(tmp_path), "documents")
    assert "--nproc" not in alone
    assert shlex.split(then)[-2:] == ["--resume", "2"]
    for command, request in ((alone, composition.reference), (first, composition.attempts[0])):
        words = shlex.split(command)
        asked = {words[at + 1] for at, word in enumerate(words) if word == "--set"}
        left_out = ("observer.", "run.", "guard.")
        assert {each for each in request.sets if not each.startswith(left_out)} <= asked
        assert words.count("--plugin") == len(request.plugins)


@pytest.mark.multiproc
@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_a_plugin_that_is_subtly_wrong_is_found_and_the_failure_is_small(tmp_path: Path) -> None:
    file = tmp_path / "own_norm.py"
    file.write_text(WRONG)
    words = (*COMMAND, "plugins", "check", "--compose", str(file), "--count", "3")
    done = run_command(words, tmp_path, timeout=500)
    assert done.returncode == ExitCode.PLUGIN
    assert "0 of 3 compositions equal" in done.stdout
    commands = [shlex.split(line) for line in done.stdout.splitlines() if line.strip().startswith("megatron-run")]
    ranks = [words[words.index("--nproc") + 1] for words in commands if "--nproc" in words]
    assert ranks, "what to type"
    assert set(ranks) == {"2"}
    assert len(commands) == 2 * len(ranks), "each beside the single process"


@pytest.mark.multiproc
@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_what_is_equal_is_equal_and_what_differs_by_little_is_seen(everything: Space) -> None:
    two = Composition((("ranks", 3),), everything)
    (equal,) = compare([two])
    assert not equal.faults
    for slight in (
        "train.weight_decay=0.051",
        "train.clip_norm=0.299",
        "model.norm.eps=1.2e-5",
        "optimizer.betas=0.9,0.9991",
    ):
        (found,) = compare([two], [slight])
        assert found.faults, f"{slight} is not seen: {found.largest}"


@pytest.mark.parametrize(
    ("rounded", "norms", "weights"),
    [([], 5e-6, 1e-6), ([(0, 1e-6, 0, 0)], 5e-6, 1e-6), ([(0, 0, 0, 2e-6), (0, 4e-6, 0, 0)], 1.2e-5, 6e-6)],
)
def test_more_is_allowed_where_roundings_of_one_process_differ_by_more(
    rounded: list[Tolerances], norms: float, weights: float
) -> None:
    diverged = Compared((float("inf"), 1.0, 0.0, 0.0))
    allowed = measured(TOLERANCES, [diverged, *map(Compared, rounded)])
    assert allowed == pytest.approx((2e-6, norms, 2e-6, weights))


@pytest.mark.multiproc
@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_what_is_beyond_the_tolerances_is_compared_with_roundings_of_one_process(
    everything: Space, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensor = Composition((("ranks", everything.splits.index(Sizes(tensor=2))),), everything)
    (equal,) = compare([tensor])
    assert not equal.faults
    assert not equal.beyond
    losses, _, evaluations, weights = TOLERANCES
    monkeypatch.setattr(compare_module, "TOLERANCES", (losses, 0.0, evaluations, weights))
    (found,) = compare([tensor])
    assert found.beyond
    assert 0.0 < found.tolerances[1] < 5e-6  # no more than roundings of this small network
    (wrong,) = compare([tensor], ["train.clip_norm=0.299"])
    assert wrong.faults
