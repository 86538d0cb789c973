"""What ``MEGATRON_RUN_FAULT`` asks for: read, refused in one line, and struck at the phase that was named."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from unittest import mock

import pytest
import torch

from megatron_run.config.faults import FAULTS, VARIABLE, Fault, read_faults
from megatron_run.config.request import Request
from megatron_run.contracts import Lender
from megatron_run.contracts.activity import Activity
from megatron_run.errors import InputError, Problems
from megatron_run.planning import resolve
from megatron_run_engine.training.health.faulting import add_faults
from tests.support.processes import wait_until


def asked(text: str, world: int = 4) -> tuple[Fault, ...]:
    return read_faults({VARIABLE: text}, world)


def test_a_fault_is_read_with_all_that_can_be_said_of_it() -> None:
    assert asked("rank=2,step=3,at=backward,kind=kill") == (Fault("backward", "kill", rank=2, steps=range(3, 4)),)
    assert asked("kind=slow, at=forward, step=2-9, seconds=0.5, nth=2, attempt=1") == (
        Fault("forward", "slow", steps=range(2, 10), seconds=0.5, nth=2, attempt=1),
    )
    assert asked("at=send,kind=stop,after=0.01;;at=load,kind=exit;") == (
        Fault("send", "stop", after=0.01),
        Fault("load", "exit"),
    )


def test_without_the_variable_there_is_none() -> None:
    assert read_faults({}, 1) == ()
    assert asked(" ; ") == ()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("rank", "'rank' is no KEY=VALUE"),
        ("rank=,at=send", "'rank=' is no KEY=VALUE"),
        ("rnak=1,at=send,kind=kill", "unknown key 'rnak' (from environment MEGATRON_RUN_FAULT); did you mean 'rank'?"),
        ("at=sned,kind=kill", "unknown phase 'sned' (from environment MEGATRON_RUN_FAULT); did you mean 'send'?"),
        ("at=send,kind=kil", "unknown kind 'kil' (from environment MEGATRON_RUN_FAULT); did you mean 'kill'?"),
        ("rank=1,kind=kill", "'rank=1,kind=kill' does not say at"),
        ("rank=1", "'rank=1' does not say at and kind"),
        ("rank=x,at=send,kind=kill", "'x' is no whole number"),
        ("rank=-1,at=send,kind=kill", "'-1' is no whole number"),
        ("step=5-3,at=send,kind=kill", "step=5-3 ends before it begins"),
        ("step=3-,at=send,kind=kill", "'' is no whole number"),
        ("nth=0,at=send,kind=kill", "'0' is not a count from 1"),
        ("rank=1,rank=2,at=send,kind=kill", "rank is given twice"),
        ("at=send,kind=slow,seconds=nan", "'nan' is no number of seconds"),
        ("at=send,kind=slow,seconds=-1", "'-1' is no number of seconds"),
        ("at=send,kind=enospc", "kind=enospc at=send (from environment MEGATRON_RUN_FAULT); only phases that save"),
        ("at=send,kind=hang,after=1", "after= with kind=hang"),
        ("rank=4,at=send,kind=kill", "rank=4 is not among 4 ranks"),
    ],
)
def test_a_mistake_is_one_line(text: str, says: str) -> None:
    with pytest.raises(InputError) as refused:
        asked(text)
    line = str(refused.value)
    assert line.startswith(says)
    assert f"from environment {VARIABLE}" in line
    assert "\n" not in line


def test_a_run_is_refused_for_a_mistake_and_tells_of_what_it_injects() -> None:
    def resolved(text: str) -> tuple[str, ...]:
        return resolve(Request(("preset:tiny",), environment={VARIABLE: text})).notices

    assert f"faults are injected: {VARIABLE}=at=send,kind=kill" in resolved("at=send,kind=kill")
    with pytest.raises(Problems, match="unknown phase 'sned'"):
        resolved("at=sned,kind=kill")
    assert not [notice for notice in resolved("") if VARIABLE in notice]


def parameters() -> list[torch.nn.Parameter]:
    found = [torch.nn.Parameter(torch.ones(2, 3)), torch.nn.Parameter(torch.ones(4))]
    for each in found:
        each.main_grad = torch.zeros_like(each)  # type: ignore[attr-defined]  # as the gradient buffers set it
    return found


def phases_with(
    text: str,
    *,
    rank: int = 1,
    attempt: int = 1,
    held: list[torch.nn.Parameter] | None = None,
    lender: Lender | None = None,
) -> Activity:
    activity = Activity()
    add_faults(asked(text), activity, rank, attempt, held or parameters(), lender)
    return activity


@pytest.mark.parametrize("text", ["", "rank=0,at=send,kind=kill", "attempt=2,at=send,kind=kill"])
def test_where_no_fault_is_this_ranks_nobody_listens(text: str) -> None:
    assert not phases_with(text).listeners


def test_it_strikes_in_its_step_at_the_nth_entrance_and_nowhere_else() -> None:
    activity = phases_with("rank=1,step=3,at=backward,nth=2,kind=oom")
    for step in (1, 2, 4):
        activity.step(step)
        for _ in range(3):
            activity.enter("backward")
    activity.step(3)
    activity.enter("forward")
    activity.enter("forward")
    activity.enter("backward")
    with pytest.raises(MemoryError):
        activity.enter("backward")
    activity.enter("backward")


def test_a_background_thread_counts_its_collectives_by_itself() -> None:
    activity = Activity()
    background = activity.in_background()
    add_faults(asked("at=collective,nth=3,kind=oom"), activity, 1, 1, parameters())
    for each in (activity, background, activity, background):
        with each.collective("all-reduce", "world", 1):
            pass
    for each in (background, activity):
        with pytest.raises(MemoryError), each.collective("all-reduce", "world", 1):
            pass


def test_non_finite_gradients_fill_what_is_accumulated_into() -> None:
    for kind in ("nan", "inf"):
        held = parameters()
        phases_with(f"at=optimizer,kind={kind}", held=held).enter("optimizer")
        grads = [each.main_grad for each in held]  # type: ignore[attr-defined]  # see above
        assert all((grad.isnan() if kind == "nan" else grad.isinf()).all() for grad in grads)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_flip_changes_one_bit_of_one_value(dtype: torch.dtype) -> None:
    held = [torch.nn.Parameter(torch.ones(2, 3, dtype=dtype))]
    phases_with("at=optimizer,kind=flip", held=held).enter("optimizer")
    width = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
    changed = held[0].detach().view(width) ^ torch.ones(2, 3, dtype=dtype).view(width)
    assert sorted(int(bits).bit_count() for bits in changed.flatten()) == [0, 0, 0, 0, 0, 1]


def test_a_flip_strikes_no_padding() -> None:
    held = [torch.nn.Parameter(torch.tensor([2.0, 3.0, 0.0, 0.0, 0.0, 0.0]))]
    phases_with("at=optimizer,kind=flip", held=held).enter("optimizer")
    assert held[0].tolist() == [2.0, 3.5, 0.0, 0.0, 0.0, 0.0]


def test_a_full_disk_names_what_was_being_written() -> None:
    with pytest.raises(OSError, match="No space left") as full:
        phases_with("at=save-shard,kind=enospc").enter("save-shard", Path("shard"))
    assert (full.value.errno, full.value.filename) == (errno.ENOSPC, "shard")


def test_slowness_takes_its_time_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr("megatron_run_engine.training.health.faulting.time.sleep", slept.append)
    activity = phases_with("at=forward,kind=slow,seconds=0.25")
    for _ in range(3):
        activity.enter("forward")
        activity.enter("backward")
    assert slept == [0.25] * 3


class Ended(BaseException):
    """The process would have ended here."""


@pytest.mark.parametrize(("kind", "number"), [("kill", 9), ("term", 15), ("stop", 19)])
def test_a_signal_reaches_this_process_at_once_or_in_the_midst_of_the_phase(
    kind: str, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr("megatron_run_engine.training.health.faulting.os.kill", lambda *call: sent.append(call))
    phases_with(f"at=receive,kind={kind}").enter("receive")
    assert sent == [(os.getpid(), number)]
    phases_with(f"at=receive,kind={kind},after=0.05").enter("receive")
    assert len(sent) == 1
    wait_until(lambda: len(sent) == 2)


def test_what_says_nothing_ends_or_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    def end(code: int) -> None:
        raise Ended(code)

    monkeypatch.setattr("megatron_run_engine.training.health.faulting.os._exit", end)
    with pytest.raises(Ended, match="9"):
        phases_with("at=receive,kind=exit").enter("receive")
    monkeypatch.setattr("megatron_run_engine.training.health.faulting.time.sleep", end)
    with pytest.raises(Ended, match="3600"):
        phases_with("at=receive,kind=hang").enter("receive")


def test_every_kind_is_tried_here() -> None:
    text = Path(__file__).read_text()
    assert not [kind for kind in FAULTS if f'"{kind}"' not in text and f"kind={kind}" not in text]


@pytest.mark.parametrize("kind", ["nan", "flip"])
def test_what_a_lender_keeps_of_parameters_that_are_away_is_struck_too(kind: str) -> None:
    held, values, gradients = parameters(), torch.ones(5), torch.zeros(5)
    held[0].untyped_storage().resize_(0)
    lender = mock.Mock(spec=Lender, kept=lambda: [(torch.ones(0), torch.ones(0)), (values, gradients)])
    phases_with(f"at=optimizer,kind={kind}", held=held, lender=lender).enter("optimizer")
    assert gradients.isnan().all() == (kind == "nan")
    assert ((values != 1).sum() == 1) == (kind == "flip")
