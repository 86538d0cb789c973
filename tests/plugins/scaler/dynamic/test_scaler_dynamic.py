"""The dynamic loss scale: where it moves, step by step, against the rules in plain numbers."""

from __future__ import annotations

import json
from fractions import Fraction
from random import Random
from typing import Any

import pytest
import torch

from megatron_run.contracts import scale_text
from megatron_run.errors import DataError
from megatron_run_scaler_dynamic import DynamicScaler, Options, megatron_run_create_scaler
from megatron_run_testing.build_contexts import single_process_context
from tests.plugins.scaler.loss_scale import LossScale, drawn_options, drawn_overflows

CPU = torch.device("cpu")
STEPS = 100


def scaler(**options: Any) -> DynamicScaler:
    return DynamicScaler(Options(**options), CPU)


def after(subject: DynamicScaler, flags: str) -> tuple[float, ...]:
    """The state after a step for each of ``flags``: ``x`` overflows, ``.`` is clean."""
    for flag in flags:
        subject.update(torch.tensor([float(flag == "x")]))
    return tuple(subject.state_dict().values())


class SideBySide(DynamicScaler):
    """Several scalers with the same options, which is what an update of longer tensors is: all of it is elementwise."""

    def __init__(self, options: Options, count: int) -> None:
        super().__init__(options, CPU)
        for name, tensor in self._state().items():
            setattr(self, f"_{name}", tensor.repeat(count))

    def walk(self, overflows: torch.Tensor) -> list[torch.Tensor]:
        """Scale, growth and hysteresis tracker after each step, each [steps, count]; ``overflows`` [steps, count]."""
        states = []
        for found_inf in overflows.float():
            self.update(found_inf)
            states.append([tensor.clone() for tensor in self._state().values()])
        return [torch.stack(each) for each in zip(*states, strict=True)]


@pytest.mark.parametrize("seed", range(20))
def test_ten_thousand_random_sequences_are_those_of_the_rules(seed: int) -> None:
    """500 sequences a seed, all under options of its own."""
    random = Random(seed)
    options = drawn_options(random)
    sequences = [drawn_overflows(random, STEPS) for _ in range(500)]
    scales, growth, hysteresis = SideBySide(Options(**options), 500).walk(torch.tensor(sequences).T)
    expected = [list(zip(*LossScale(**options).walk(sequence), strict=True)) for sequence in sequences]
    for found, index in ((scales, 0), (growth, 1), (hysteresis, 2)):
        wanted = torch.tensor([states[index] for states in expected], dtype=torch.float64)
        assert torch.equal(found.T.double(), wanted)


def test_the_rules_of_the_oracle_move_everything() -> None:
    """Over the drawn sequences scales grow, back off and rest on their minimum, and trackers go below 0."""
    states = []
    for seed in range(20):
        random = Random(seed)
        options = drawn_options(random)
        first, least = options["initial_loss_scale"], options["min_loss_scale"]
        walk = LossScale(**options).walk(drawn_overflows(random, STEPS))
        states += [(scale / first, scale == least, tracker) for scale, _, tracker in walk]
    ratios, rests, trackers = zip(*states, strict=True)
    assert min(ratios) < 1 < max(ratios)
    assert any(rests)
    assert min(trackers) < 0


def test_it_starts_from_megatrons_defaults() -> None:
    made = megatron_run_create_scaler(single_process_context(), Options())
    assert made.state_dict() == {"scale": 2.0**32, "growth_tracker": 0, "hysteresis_tracker": 2}
    assert after(scaler(), "x" + "." * 999) == (2.0**32, 999, 1)
    assert after(scaler(), "x" + "." * 1000) == (2.0**33, 0, 2)
    assert after(scaler(), "x" * 80) == (1.0, 0, -78)


@pytest.mark.parametrize(
    ("flags", "state"),
    [
        ("x", (16.0, 0, 1)),  # the first overflow is forgiven
        ("xx", (8.0, 0, 0)),
        ("xxx", (4.0, 0, -1)),  # from then on each halves
        ("x..x", (8.0, 0, 0)),  # clean steps forgive nothing
        ("xx..x", (4.0, 0, -1)),  # nor does a backoff
        ("xx...", (16.0, 0, 2)),  # growth does
        ("..x..", (16.0, 2, 1)),  # an overflow begins the window anew
    ],
)
def test_hysteresis_is_refilled_by_growth_alone(flags: str, state: tuple[float, int, int]) -> None:
    assert after(scaler(initial_loss_scale=16, loss_scale_window=3), flags) == state


def test_a_window_of_one_grows_at_every_clean_step() -> None:
    assert after(scaler(initial_loss_scale=1, loss_scale_window=1), "....") == (16.0, 0, 2)


def test_it_stops_growing_while_its_reciprocal_is_normal() -> None:
    subject = scaler(initial_loss_scale=2.0**98, loss_scale_window=1)
    assert after(subject, "...") == (2.0**99, 0, 2)
    assert subject.inv_scale.item() == 2.0**-99 > torch.finfo(torch.float32).smallest_normal
    assert after(subject, "xx")[0] == 2.0**98


def test_an_update_reads_nothing_on_the_host() -> None:
    """On the meta device there is nothing to read: what asks for a value fails."""
    subject = DynamicScaler(Options(), torch.device("meta"))
    subject.update(torch.zeros(1, device="meta"))
    assert subject.scale.is_meta


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.gpu
def test_on_a_gpu_an_update_waits_for_nothing_and_moves_as_on_the_cpu() -> None:
    options = Options(loss_scale_window=3)
    subject, flags = DynamicScaler(options, torch.device("cuda")), "xx...x.x..xx."
    steps = [torch.tensor([float(flag == "x")], device="cuda") for flag in flags]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for found_inf in steps:
            subject.update(found_inf)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert tuple(subject.state_dict().values()) == after(DynamicScaler(options, CPU), flags)


def test_the_state_survives_json_and_replaces_another() -> None:
    subject, other = scaler(loss_scale_window=5), scaler(loss_scale_window=5)
    after(subject, "xx...")
    after(other, "xxxxxxx")
    other.load_state_dict(json.loads(json.dumps(subject.state_dict())))
    assert after(other, "..") == after(subject, "..") == (2.0**32, 0, 2)


def test_a_state_of_a_longer_window_grows_at_once() -> None:
    subject = scaler(loss_scale_window=10)
    subject.load_state_dict({"scale": 4.0, "growth_tracker": 500, "hysteresis_tracker": 1})
    assert after(subject, ".") == (8.0, 0, 2)


@pytest.mark.parametrize(
    ("state", "line"),
    [
        (
            {"scale": 4.0},
            (
                "the state of scaler=dynamic holds scale: scale, growth_tracker, hysteresis_tracker are needed; "
                "choose the scaler that wrote it"
            ),
        ),
        (
            {},
            (
                "the state of scaler=dynamic holds nothing: scale, growth_tracker, hysteresis_tracker are needed; "
                "choose the scaler that wrote it"
            ),
        ),
        (
            {"scale": float("inf"), "growth_tracker": 1, "hysteresis_tracker": 1},
            "the state of scaler=dynamic has the scale inf: it must be between 1e-30 and 1e+30",
        ),
        (
            {"scale": 0.0, "growth_tracker": 1, "hysteresis_tracker": 1},
            "the state of scaler=dynamic has the scale 0: it must be between 1e-30 and 1e+30",
        ),
    ],
)
def test_a_state_that_does_not_fit_is_refused_whole(state: dict[str, float], line: str) -> None:
    subject = scaler()
    with pytest.raises(DataError) as caught:
        subject.load_state_dict(state)
    assert str(caught.value) == line
    assert subject.state_dict() == scaler().state_dict()


@pytest.mark.parametrize("exponent", [-13, -1, 0, 1, 16, 24, 32, 60])
def test_a_power_of_two_is_shown_in_all_its_digits(exponent: int) -> None:
    text = scale_text(2.0**exponent)
    assert Fraction(text) == Fraction(2) ** exponent
    assert set(text) <= set("0123456789.")


def test_any_other_scale_is_shown_as_it_would_be_typed() -> None:
    assert [scale_text(each) for each in (1000, 1000.5, 0.1)] == ["1000", "1000.5", "0.1"]
