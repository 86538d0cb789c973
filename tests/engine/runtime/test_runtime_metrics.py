from __future__ import annotations

import math

import pytest
import torch

from megatron_run.errors import PluginError
from megatron_run_engine.runtime.comm import Groups
from megatron_run_engine.runtime.metrics import Metrics


def test_a_meter_is_a_weighted_mean_that_starts_again_after_each_step() -> None:
    metrics = Metrics(torch.device("cpu"))
    loss, silent = metrics.scalar("lm"), metrics.scalar("aux")
    loss.add(torch.tensor(6.0), torch.tensor(3.0))
    loss.add(4.0)
    assert metrics.means(metrics.collect(Groups()).tolist()) == {"lm": 2.5}
    silent.add(1.0, 2.0)
    assert metrics.means(metrics.collect(Groups()).tolist()) == {"aux": 0.5}


def test_what_is_added_leaves_its_history_behind() -> None:
    metrics, weight = Metrics(torch.device("cpu")), torch.ones(2, requires_grad=True)
    meter = metrics.scalar("lm")
    meter.add((2 * weight).sum(), weight.sum())
    sums = metrics.collect(Groups())
    assert not sums.requires_grad
    assert sums.tolist() == [[4.0, 2.0]]


def test_a_total_is_a_sum_whatever_the_weights() -> None:
    metrics = Metrics(torch.device("cpu"))
    calls, mean = metrics.total("calls"), metrics.scalar("mean")
    for _ in range(3):
        calls.add(2.0, 7.0)
        mean.add(2.0)
    assert metrics.means(metrics.collect(Groups()).tolist()) == {"calls": 6.0, "mean": 2.0}
    assert metrics.means(metrics.collect(Groups()).tolist()) == {}


def test_the_largest_value_is_reported_of_this_step_alone() -> None:
    metrics = Metrics(torch.device("cpu"))
    before, score = metrics.scalar("lm"), metrics.largest("score")
    for value in (-3.0, -1.5, -2.0):
        score.add(torch.tensor(value))
        before.add(value)
    assert metrics.means(metrics.collect(Groups()).tolist()) == {"lm": pytest.approx(-13 / 6), "score": -1.5}
    score.add(-7.0)
    assert metrics.means(metrics.collect(Groups()).tolist()) == {"score": -7.0}
    assert metrics.means(metrics.collect(Groups()).tolist()) == {}


def test_what_is_no_number_is_the_largest_on_whichever_rank_it_is() -> None:
    metrics = Metrics(torch.device("cpu"))
    score = metrics.largest("score")
    for value in (2.0, math.nan, 3.0):
        score.add(value)
    assert metrics.means(metrics.collect(Groups()).tolist()) == {"score": math.inf}
    score.add(3.0)
    assert metrics.means(metrics.collect(Groups()).tolist()) == {"score": 3.0}


def test_a_name_is_given_out_once() -> None:
    metrics = Metrics(torch.device("cpu"))
    metrics.scalar("lm")
    with pytest.raises(PluginError, match="'lm' is reported twice"):
        metrics.scalar("lm")


def test_collect_returns_what_was_added_and_not_a_view_that_is_cleared() -> None:
    metrics = Metrics(torch.device("cpu"))
    metrics.scalar("x").add(5.0)
    assert metrics.collect(Groups()).tolist() == [[5.0, 1.0]]
