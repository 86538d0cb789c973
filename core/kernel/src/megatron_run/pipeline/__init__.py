"""From action lists to a run: verify them, order their messages, lower them for one stage, draw them.

``verify`` proves a schedule's lists and returns a :class:`~megatron_run.pipeline.plan.Plan`; ``forward_plan`` makes one
for evaluation; ``lower`` turns a plan into one stage's instructions; ``timeline`` draws it. These never import torch.
"""
