"""AdamW and Adam in one pass over memory, for devices that wait for their memory.

PyTorch's fused kernel writes back the gradients that it unscales, and leaves the rounding of masters to another pass:
38 bytes a parameter. This one moves 30: it reads and writes masters and moments, reads gradients and writes parameters
of 16 bits. One launch takes all stretches, whose addresses lie in a table; PyTorch's optimizer keeps their state.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from megatron_run_engine.nn.fused import has_kernels
from megatron_run_engine.optim.buckets import ALIGNMENT

if TYPE_CHECKING:
    from collections.abc import Sequence

    from megatron_run_engine.optim.stretches import Stretch
    from megatron_run_engine.optim.update_rules import UpdateRule

#: Values of a program, and its warps: eight values a thread.
BLOCK, _WARPS = 2048, 8
#: What the kernel knows of the rules' arguments.
_KNOWN = frozenset({"betas", "eps", "fused"})


class _Table(NamedTuple):
    """The stretches of one launch, as the kernel expects them; ``rounded`` is the type of their parameters, if any."""

    stretches: Tensor
    owners: Tensor
    lr_mult: Tensor
    decays: Tensor
    steps: Tensor
    rounded: torch.dtype | None


class OnePass:
    """Updates ``stretches`` as ``optimizer`` of ``rule`` would, whose state it makes and changes."""

    def __init__(self, rule: UpdateRule, optimizer: torch.optim.Optimizer, stretches: Sequence[Stretch]) -> None:
        self._optimizer, self._stretches = optimizer, stretches
        self._betas, self._eps = rule.arguments["betas"], rule.arguments["eps"]
        self._decoupled = rule.kind is torch.optim.AdamW
        self._tables: list[_Table] | None = None

    def forget(self) -> None:
        """The optimizer's state is other memory from now on."""
        self._tables = None

    @torch.no_grad()
    def step(self, lr: float, weight_decay: float, factor: Tensor | None) -> None:
        """Update every stretch with gradients times ``factor``, and round it to parameters."""
        if self._tables is None:
            self._tables = self._make_tables()
        for table in self._tables:
            table.steps.add_(1)
            self._launch(table, self._rates(table, lr, weight_decay), factor)

    def _rates(self, table: _Table, lr: float, weight_decay: float) -> Tensor:
        """Differences between stretches, [n, 4]; the corrections need float64: 1 - 0.999 has four digits in fp32."""
        steps, rate = table.steps.double(), table.lr_mult * lr
        first, second = (1 - beta**steps for beta in self._betas)
        decay = table.decays * weight_decay
        return torch.stack((decay, rate * decay, rate / first, second.rsqrt()), dim=1).float()

    def _launch(self, table: _Table, rates: Tensor, factor: Tensor | None) -> None:
        import triton.language as tl

        from megatron_run_engine.optim import one_pass_kernels as kernels

        kinds = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
        with torch.cuda.device_of(rates):
            kernels.update[(len(table.owners),)](
                table.stretches, table.owners, rates, rates if factor is None else factor,
                kind=kinds[table.rounded or torch.float32], beta1=self._betas[0], beta2=self._betas[1], eps=self._eps,
                scaled=factor is not None, decoupled=self._decoupled, rounded=table.rounded is not None,
                block=BLOCK, num_warps=_WARPS,
            )  # fmt: skip

    def _make_tables(self) -> list[_Table]:
        """One for each type of parameters. Reads nothing from the device."""
        kinds = dict.fromkeys(map(_rounded, self._stretches))
        return [self._table([each for each in self._stretches if _rounded(each) == kind], kind) for kind in kinds]

    def _state(self, stretch: Stretch) -> dict[str, Any]:
        """The optimizer's state of ``stretch``, with what its own first step would make of nothing."""
        state: dict[str, Any] = self._optimizer.state[stretch.values]
        if not state:
            state["step"] = torch.zeros((), device=stretch.values.device)
            state["exp_avg"], state["exp_avg_sq"] = (torch.zeros_like(stretch.values) for _ in range(2))
        return state

    def _table(self, stretches: Sequence[Stretch], rounded: torch.dtype | None) -> _Table:
        device = stretches[0].values.device
        states = [self._state(stretch) for stretch in stretches]
        rows: list[list[int]] = []
        owners: list[int] = []
        for number, (stretch, state) in enumerate(zip(stretches, states, strict=True)):
            assert stretch.values.grad is not None
            parameters = stretch.shard.values[stretch.in_bucket.start : stretch.in_bucket.stop]
            tensors = (stretch.values, stretch.values.grad, state["exp_avg"], state["exp_avg_sq"], parameters)
            rows.append([stretch.values.numel(), len(owners), *(each.data_ptr() for each in tensors)])
            owners += [number] * -(-stretch.values.numel() // BLOCK)
        steps = torch.stack([state["step"] for state in states])
        for state, step in zip(states, steps.unbind(), strict=True):
            state["step"] = step  # a view of one tensor, so that one operation counts for all
        groups = [stretch.group for stretch in stretches]
        return _Table(
            torch.tensor(rows, dtype=torch.int64, device=device),
            torch.tensor(owners, dtype=torch.int32, device=device),
            torch.tensor([group.lr_mult for group in groups], dtype=torch.float64, device=device),
            torch.tensor([float(group.decays) for group in groups], dtype=torch.float64, device=device),
            steps,
            rounded,
        )


def one_pass_of(
    rule: UpdateRule, optimizer: torch.optim.Optimizer, stretches: Sequence[Stretch], device: torch.device
) -> OnePass | None:
    """The update of ``stretches`` in one pass; None where torch's own is needed."""
    known = rule.kind in (torch.optim.AdamW, torch.optim.Adam) and rule.arguments.keys() <= _KNOWN
    if not known or not rule.arguments.get("fused") or not all(map(_fits, stretches)) or not has_kernels(device.type):
        return None
    return OnePass(rule, optimizer, stretches)


def _fits(stretch: Stretch) -> bool:
    """Whether the kernel takes ``stretch``: a flat one of fp32, rounded to a type that it knows, of aligned bounds."""
    if _rounded(stretch) not in (None, torch.bfloat16, torch.float16):
        return False
    aligned = not (len(stretch.in_bucket) % ALIGNMENT or stretch.shard.local(stretch.in_bucket).start % ALIGNMENT)
    return aligned and stretch.values.ndim == 1 and stretch.values.dtype == torch.float32


def _rounded(stretch: Stretch) -> torch.dtype | None:
    return stretch.shard.values.dtype if stretch.shard.has_masters else None
