"""Lion (Chen et al. 2023, algorithm 2): steps by the sign of an interpolated momentum."""

from __future__ import annotations

from typing import Any

import torch


class Lion(torch.optim.Optimizer):
    def __init__(self, groups: Any, lr: float = 1e-4, beta1: float = 0.9, beta2: float = 0.99) -> None:
        super().__init__(groups, {"lr": lr, "weight_decay": 0.0, "beta1": beta1, "beta2": beta2})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # the loss is computed already
        for group in self.param_groups:
            for parameter in group["params"]:
                gradient, state = parameter.grad, self.state[parameter]
                momentum = state.setdefault("momentum", torch.zeros_like(parameter))
                direction = gradient.lerp(momentum, group["beta1"]).sign()
                parameter.mul_(1 - group["lr"] * group["weight_decay"]).sub_(direction, alpha=group["lr"])
                momentum.lerp_(gradient, 1 - group["beta2"])
