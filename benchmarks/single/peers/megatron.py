"""megatron-core's own GPT, gradient buffers and optimizer in one process, where megatron-core is installed.

On a GPU with its Transformer Engine layers and its fused kernels, as its users run it, or with local layers. On a CPU
its code runs as it is; only the device that it names, which is always a GPU, is another. Without Transformer Engine it
takes PyTorch's AdamW, here in one kernel. The all-reduce over its one data-parallel rank is left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from benchmarks.single.model import CLIP_NORM, LEARNING_RATE, WEIGHT_DECAY, Batch, Precision, Side, Weights
from benchmarks.support.megatron import TorchOnCpu
from benchmarks.support.shape import Shape
from benchmarks.tensor_parallel.peers.megatron import gpt_model, on_cpu, their_weights
from megatron_run_engine.runtime.transformer_engine import import_led

#: The modules, besides those that its layers need, which name a GPU.
ON_A_GPU = ("optimizer", "optimizer.optimizer", "optimizer.clip_grads", "distributed.param_and_grad_buffer")
#: Its kernels that are fused by torch's own means; the others need Apex, or come with Transformer Engine's layers.
UNFUSED = {"masked_softmax_fusion": False}
FUSED = {"bias_activation_fusion": True, "bias_dropout_fusion": True, "cross_entropy_loss_fusion": True}


class MegatronLoop(Side):
    """Its network trained by its optimizer; bf16 is its own: 16-bit weights, fp32 masters."""

    def __init__(
        self,
        shape: Shape,
        weights: Weights | None,
        precision: Precision,
        device: str = "cpu",
        *,
        local: bool = True,
    ) -> None:
        self._device = device
        if not local:  # before megatron-core imports it, which would not look where torch's libraries lie
            import_led("transformer_engine.pytorch")
        (_once_on_cpu if device == "cpu" else _once_on_gpu)()
        bf16 = precision == "bf16"
        halves = {"bf16": True, "params_dtype": torch.bfloat16} if bf16 else {}
        model = gpt_model(shape, 1, tied=True, local=local, **halves, **(UNFUSED if local else FUSED))
        if weights is not None:
            whole = their_weights(weights, shape.heads)
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    parameter.copy_(whole[name])
        self._positions = torch.arange(shape.sequence, device=device).expand(shape.micro_batch, -1)
        self._model = _buffered(model.to(device), bf16=bf16)
        with self._types():
            self._optimizer = _optimizer(self._model, bf16=bf16)

    def step(self, batch: Batch) -> float:
        """One step."""
        self._model.zero_grad_buffer()
        self._optimizer.zero_grad()
        total = torch.zeros((), device=self._device)
        for tokens, labels in batch:
            losses: Tensor = self._model(tokens, self._positions, None, labels=labels)  # [b, s]
            loss = losses.float().mean() / len(batch)
            loss.backward()
            total += loss.detach()
        with self._types():
            self._optimizer.step()
        return total.item()

    def _types(self) -> AbstractContextManager[None]:
        return _types_of_a_gpu() if self._device == "cpu" else nullcontext()


def _once_on_gpu() -> None:
    """As its own programs begin, in a world of one."""
    state = import_module("megatron.core.parallel_state")
    if not state.is_initialized():
        state.initialize_model_parallel(create_gloo_process_groups=False)
        import_module("megatron.core.tensor_parallel.random").model_parallel_cuda_manual_seed(1)


def _once_on_cpu() -> None:
    """Both precisions share a process."""
    if not import_module("megatron.core.parallel_state").is_initialized():
        on_cpu(1)
        for module in ON_A_GPU:
            vars(import_module(f"megatron.core.{module}"))["torch"] = TorchOnCpu()


def _buffered(model: Any, *, bf16: bool) -> Any:
    """Its gradients in fp32 buffers."""
    distributed = import_module("megatron.core.distributed")
    config = distributed.DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=False)
    if bf16:
        model = import_module("megatron.core.transformer.module").Float16Module(model.config, model)
    return distributed.DistributedDataParallel(model.config, config, model)


def _optimizer(model: Any, *, bf16: bool) -> Any:
    module = import_module("megatron.core.optimizer")
    config = module.OptimizerConfig(
        optimizer="adam",
        lr=LEARNING_RATE,
        weight_decay=WEIGHT_DECAY,
        clip_grad=CLIP_NORM,
        bf16=bf16,
        params_dtype=torch.bfloat16 if bf16 else torch.float32,
    )
    optimizer = module.get_megatron_optimizer(config, [model], use_gloo_process_groups=False)
    if module.USING_PYTORCH_OPTIMIZER:
        for group in optimizer.param_groups:
            group.update(fused=True, foreach=False)
    return optimizer


@contextmanager
def _types_of_a_gpu() -> Iterator[None]:
    """Inside: tensors say that they are on a GPU, by the names that its optimizer compares with."""
    original = torch.Tensor.type

    def their_type(tensor: Tensor, *rest: Any, **more: Any) -> Any:
        found = original(tensor, *rest, **more)
        return found.replace("torch.", "torch.cuda.") if isinstance(found, str) else found

    torch.Tensor.type = their_type  # type: ignore[method-assign, assignment]  # put back below
    try:
        yield
    finally:
        torch.Tensor.type = original  # type: ignore[method-assign]
