"""Pipelines on paper: verifies the action lists of a schedule, orders their messages, lowers and draws them.

``verify`` proves a schedule's lists and returns a :class:`~megatron_run.pipeline.plan.Plan`; ``forward_plan`` builds
the plan of an evaluation; ``lower`` turns a plan into one stage's instructions; ``simulate`` computes their times.

Imports: contracts, errors.
"""
