"""Plans to draw: a 1F1B and an interleaved one, written down without the plugins, and any from its text."""

from __future__ import annotations

from megatron_run.contracts.schedule import Action, LayoutSpec, ScheduleSpec, looped_layout
from megatron_run.pipeline.plan import Plan
from megatron_run.pipeline.verify import verify
from tests.support.random_schedules import looped_spec


def plan_of(*texts: str, spec: ScheduleSpec | None = None) -> Plan:
    """The plan of lists written as words, one text a stage; one chunk a stage unless ``spec`` says otherwise."""
    lists = [[Action.parse(word) for word in text.split()] for text in texts]
    microbatches = 1 + max(action.microbatch for actions in lists for action in actions)
    stages = len(lists)
    layout = looped_layout(LayoutSpec(stages, 1, stages))
    return verify(spec or ScheduleSpec(layout, stages, 1, microbatches), lists)


def one_forward_one_backward_plan(stages: int = 4, microbatches: int = 8) -> Plan:
    """1F1B: stage p warms up with P - p - 1 forwards."""
    texts = []
    for stage in range(stages):
        warmup = min(stages - stage - 1, microbatches)
        words = [f"F{m}.0" for m in range(warmup)]
        words += [f"{op}.0" for m in range(microbatches - warmup) for op in (f"F{m + warmup}", f"B{m}")]
        texts.append(" ".join(words + [f"B{m}.0" for m in range(microbatches - warmup, microbatches)]))
    return plan_of(*texts)


def interleaved_plan(stages: int = 4, chunks: int = 2, microbatches: int = 8) -> Plan:
    """Interleaved 1F1B in groups of P microbatches; M is a multiple of P."""
    spec = looped_spec(stages, chunks, microbatches)
    visits = sorted(
        ((m, chunk) for m in range(microbatches) for chunk in range(chunks)),
        key=lambda visit: (visit[0] // stages, visit[1], visit[0]),
    )
    lists = []
    for stage in range(stages):
        forwards = [Action("F", m, chunk) for m, chunk in visits]
        backwards = [Action("B", m, chunks - 1 - chunk) for m, chunk in visits]
        actions: list[Action] = []
        ahead = 2 * (stages - stage - 1) + (chunks - 1) * stages
        while backwards:
            while forwards and len(actions) < ahead:
                actions.append(forwards.pop(0))
            actions += [forwards.pop(0)] if forwards else []
            actions.append(backwards.pop(0))
        lists.append(actions)
    return verify(spec, lists)
