"""The paper half of pipelines: verifies the action lists of a schedule, orders their messages, lowers them, draws them.

``verify`` proves a schedule's lists and returns a :class:`~megatron_run.pipeline.plan.Plan`; ``forward_plan`` makes one
for evaluation; ``lower`` turns a plan into one stage's instructions; ``timeline`` gives their times.

Imports: contracts, errors.
"""
