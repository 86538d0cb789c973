"""What stage 1 of 2 carries out in a step of 1F1B with 3 microbatches."""

from collections.abc import Iterable

from megatron_run.contracts.schedule import LayoutSpec, ScheduleSpec, looped_layout
from megatron_run.pipeline.lower import Message, lower
from megatron_run.pipeline.verify import verify
from megatron_run_schedule_1f1b import OneForwardOneBackward

spec = ScheduleSpec(looped_layout(LayoutSpec(2, 1, 2)), stages=2, chunks=1, microbatches=3)
plan = verify(spec, OneForwardOneBackward().actions(spec))


def names(operation: str, messages: Iterable[Message | None]) -> str:
    return " ".join(f"{operation} {m.kind}{m.microbatch} {m.source}>{m.target}," for m in messages if m)


for step in lower(plan, stage=1, lookahead=1):  # as on gloo
    before = f"{names('post', step.post)} {names('wait', [step.receive])} {names('retire', step.retire)}"
    after = names("send", [step.send]) + " start the gradient sync" * step.sync
    print(" ".join(f"{before} {step.action}, {after}".split()).strip(","))
