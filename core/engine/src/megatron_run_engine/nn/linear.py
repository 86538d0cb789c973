"""A linear layer whose backward a schedule may split in two, and the product that adds its weight gradient.

The input gradient is computed at once, since the previous stage waits for it. The weight gradient is submitted to the
:class:`~megatron_run_engine.runtime.gradients.GradientAccumulator`, which computes it now (action B) or later (action
W) and accumulates it in ``main_grad``.

A CPU adds a product of bf16 matrices to an fp32 total without rounding it to bf16 in between, where it can. torch's own
products of bf16 matrices return bf16 there. The MKL inside its library has one that returns fp32; torch's fused
attention calls it, but no operation of torch does. Here it is an operation of its own, so that a captured or compiled
graph contains it. With AMX it takes 0.6 times as long as the rounded product and its addition.

A CPU that multiplies bf16 matrices slower than fp32 ones widens the operands instead, which is as exact, and does so in
the layer's other products too. Others keep the rounded product.

Where an activation follows whose backward brings the bias's gradient, that is not summed again (``gelu``).

Legend: * any leading dimensions, N their product, i inputs, o outputs, u terms of a bias's gradient; of a wide product
m, n rows and columns of the total, k terms of each sum.
"""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.library import Library
from torch.nn import functional as F

from megatron_run.contracts import Init, ParameterSpec
from megatron_run_engine.nn.device import device_type, on_cpu, stands_for_gpu, widens_by_hardware
from megatron_run_engine.nn.fused import add_column_sums, fuses
from megatron_run_engine.nn.gelu import activated, shared_terms
from megatron_run_engine.nn.parameter import empty_parameter
from megatron_run_engine.runtime.gradients import main_grad

if TYPE_CHECKING:
    from torch.nn import Parameter

    from megatron_run_engine.nn.gelu import Activation, Terms
    from megatron_run_engine.runtime.context import BuildContext
    from megatron_run_engine.runtime.gradients import GradientAccumulator

_ROWS, _PLAIN, _TRANSPOSED = 101, 111, 112  # CBLAS's numbers for these words
#: m, n, k and leading dimensions are 32-bit integers.
_LARGEST = 2**31 - 1
#: Rows that a product must have at least, for widening its matrix to take less time than it saves.
_ENOUGH_ROWS = 64

_library = Library("megatron_run_engine", "FRAGMENT")
_library.define("add_wide_product(Tensor(a!) total, Tensor left, Tensor right) -> ()")


def can_add(total: Tensor, left: Tensor, right: Tensor) -> bool:
    """Whether :func:`add_wide_product` takes these."""
    types = (total.dtype, left.dtype, right.dtype) == (torch.float32, torch.bfloat16, torch.bfloat16)
    if not types or not on_cpu(total) or total.stride(-1) != 1 or _gemm() is None:
        return False
    return bool(max(*total.shape, left.shape[1], *total.stride(), *left.stride(), *right.stride()) <= _LARGEST)


def add_wide_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """``total += left @ right`` with fp32 sums: total [m, n] fp32, left [m, k] and right [k, n] bf16."""
    torch.ops.megatron_run_engine.add_wide_product(total, left, right)


def _add(total: Tensor, left: Tensor, right: Tensor) -> None:
    gemm = _gemm()
    assert gemm is not None  # whoever calls has asked can_add()
    (m, n), k = total.shape, left.shape[1]
    if not m * n * k:
        return
    left, transpose_left, step_left = _operand(left)
    right, transpose_right, step_right = _operand(right)
    sizes, step = (m, n, k), max(n, total.stride(0))
    operands = (1.0, left.data_ptr(), step_left, right.data_ptr(), step_right, 1.0, total.data_ptr(), step)
    gemm(_ROWS, transpose_left, transpose_right, *sizes, *operands)


def _operand(matrix: Tensor) -> tuple[Tensor, int, int]:
    """``matrix``, copied where neither its rows nor its columns are contiguous; how it lies; its leading dimension."""
    rows, columns = matrix.shape
    for layout, step, inner, least in ((_PLAIN, 0, 1, columns), (_TRANSPOSED, 1, 0, rows)):
        if matrix.stride(inner) == 1 and matrix.stride(step) >= least:
            return matrix, layout, matrix.stride(step)
    return matrix.clone(memory_format=torch.contiguous_format), _PLAIN, columns


@cache
def _gemm() -> Callable[..., None] | None:
    """``cblas_gemm_bf16bf16f32`` of torch's library; None without it, or on a CPU where it may be slow."""
    try:
        if not torch.cpu._is_amx_tile_supported():
            return None
        found = ctypes.CDLL(str(Path(torch.__file__).with_name("lib") / "libtorch_cpu.so")).cblas_gemm_bf16bf16f32
    except (AttributeError, OSError):
        return None
    number, factor, address = ctypes.c_int, ctypes.c_float, ctypes.c_void_p
    matrices = (factor, address, number, address, number, factor, address, number)
    found.argtypes, found.restype = (*(number,) * 6, *matrices), None
    made: Callable[..., None] = found
    return made


_library.impl("add_wide_product", _add, "CPU")
_library.impl("add_wide_product", lambda *_: None, "Meta")


#: What a product keeps of one of its operands for another that takes it later.
Operand = tuple[Tensor, ...]


class Products:
    """The three matrix products of a :class:`LinearLayer`, in the types of their operands.

    Another arithmetic derives from this class. Two products take each operand: x those of the forward and of the
    weight's gradient, the gradient those of x and of the weight. An arithmetic that prepares operands overrides the
    methods that keep one, so as to prepare it once for both.
    """

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """``x @ weight.T + bias``: x [*, i], weight [o, i], bias [o] -> [*, o]."""
        return multiply(x, weight, bias)

    def forward_keeping(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Operand]:
        """:meth:`forward` and :meth:`keep_input`."""
        return self.forward(x, weight, bias), self.keep_input(x)

    def keep_input(self, x: Tensor) -> Operand:
        """The factor of :meth:`add_weight_gradient` from x [*, i]; it waits for the backward."""
        return (x,)

    def input_gradient(self, grad: Tensor, weight: Tensor) -> Tensor:
        """``grad @ weight``: grad [*, o], weight [o, i] -> [*, i]."""
        return multiply(grad, weight.t())

    def input_gradient_keeping(self, grad: Tensor, weight: Tensor) -> tuple[Tensor, Operand]:
        """:meth:`input_gradient` and :meth:`keep_gradient`."""
        return self.input_gradient(grad, weight), self.keep_gradient(grad)

    def keep_gradient(self, grad: Tensor) -> Operand:
        """The factor of :meth:`add_weight_gradient` from ``grad`` [*, o]; a schedule may let it wait for W."""
        return (grad,)

    def add_weight_gradient(self, total: Tensor, grad: Operand, x: Operand) -> None:
        """``total += grad.T @ x``: total [o, i], and what was kept of grad [*, o] and x [*, i]."""
        (rows,), (inputs,) = grad, x
        add_product(total, rows.flatten(0, -2).t(), inputs.flatten(0, -2))


PLAIN = Products()


class LinearLayer(nn.Module):
    """Base of layers that multiply by ``products``, which may be set to another arithmetic.

    One that ``activates`` takes a function of its result as the second argument of ``forward``, which it may fuse.
    """

    products: Products = PLAIN
    activates = False


def linear(
    x: Tensor,
    weight: Parameter,
    bias: Parameter | None,
    gradients: GradientAccumulator,
    products: Products = PLAIN,
    activation: Activation | None = None,
) -> Tensor:
    """``activation(x @ weight.T + bias)``: x [*, i], weight [o, i], bias [o] -> [*, o].

    Gradients of weight and bias go to ``gradients``.
    """
    terms = shared_terms(activation, x, bias)
    if torch.is_grad_enabled():
        y: Tensor = _Linear.apply(x, weight, bias, gradients, products, terms)  # type: ignore[no-untyped-call]  # torch's
    else:  # an autograd function costs more than a small product
        y = products.forward(x, weight, bias)
    return activated(y, activation, terms)


class ReplicatedLinear(nn.Module):
    """A linear layer that every tensor-parallel rank holds whole, outside tensor-parallel regions.

    ``on_parts``: under sequence parallelism each rank applies it to its own tokens, so that its gradient is one term of
    a sum. Else all of them apply it to the same.
    """

    def __init__(
        self,
        context: BuildContext,
        inputs: int,
        outputs: int,
        init: Init,
        *,
        bias: bool = False,
        on_parts: bool = True,
    ) -> None:
        super().__init__()
        self.gradients = context.gradients
        partial_over: Literal["tensor"] | None = "tensor" if on_parts and context.sequence_shards > 1 else None
        self.weight = empty_parameter(context, outputs, inputs)
        self.bias = empty_parameter(context, outputs) if bias else None
        self.parameter_specs = {"weight": ParameterSpec(init, partial_over=partial_over)}
        if bias:
            self.parameter_specs["bias"] = ParameterSpec(Init("zeros"), partial_over=partial_over)

    def forward(self, x: Tensor) -> Tensor:
        """[*, inputs] -> [*, outputs]."""
        return linear(x, self.weight, self.bias, self.gradients)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Parameter,
        bias: Parameter | None,
        gradients: GradientAccumulator,
        products: Products,
        terms: Terms | None,
    ) -> Tensor:
        # The parameters themselves, not saved tensors: under activation checkpointing those come back as copies
        # without main_grad.
        ctx.weight, ctx.bias, ctx.gradients, ctx.products, ctx.terms = weight, bias, gradients, products, terms
        if not weight.requires_grad:
            return products.forward(x, weight, bias)
        result, kept = products.forward_keeping(x, weight, bias)
        ctx.save_for_backward(*kept)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, None, None, None, None]:
        (grad,), x = grads, ctx.saved_tensors
        of_x, kept = input_gradient(ctx.products, grad, ctx.weight, wanted=ctx.needs_input_grad[0])
        if ctx.weight.requires_grad:
            submit_gradients(ctx.gradients, ctx.weight, ctx.bias, x, grad, kept, ctx.products, ctx.terms)
        # None for weight and bias: autograd must not accumulate what has been submitted.
        return of_x, None, None, None, None, None


def input_gradient(products: Products, grad: Tensor, weight: Tensor, *, wanted: bool) -> tuple[Tensor | None, Operand]:
    """``grad @ weight`` if it is ``wanted``, and what is kept of grad [*, o] if ``weight`` [o, i] is trained."""
    if not weight.requires_grad:
        return (products.input_gradient(grad, weight) if wanted else None), ()
    return products.input_gradient_keeping(grad, weight) if wanted else (None, products.keep_gradient(grad))


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias``: [*, i] -> [*, o], in fp32 and rounded once where that takes less time."""
    if not widening_pays(x):
        return F.linear(x, weight, bias)
    return F.linear(x.float(), weight.float(), None if bias is None else bias.float()).to(x.dtype)


def submit_gradients(
    gradients: GradientAccumulator,
    weight: Parameter,
    bias: Parameter | None,
    x: Operand,
    grad: Tensor,
    kept: Operand,
    products: Products = PLAIN,
    terms: Terms | None = None,
) -> None:
    """Submit the gradients of ``weight`` [o, i] and ``bias`` [o]: x and ``kept`` are what ``products`` keeps.

    x [*, i] is the layer's input, ``kept`` is of ``grad`` [*, o]. The bias's is the sum of the ``terms`` [u, o] that
    have been left, by default of the rows of ``grad``.
    """
    of_bias = grad.flatten(0, -2) if terms is None else terms.take()  # [*, o] -> [N, o]

    def add() -> None:
        products.add_weight_gradient(main_grad(weight), kept, x)

    if bias is None:
        gradients.submit((weight,), add)
        return

    def add_both() -> None:
        add()
        add_rows(main_grad(bias), of_bias)

    gradients.submit((weight, bias), add_both)


def add_rows(total: Tensor, rows: Tensor) -> None:
    """``total += rows.sum(0)``: [o] and [N, o]; on a GPU the sum is not rounded to 16 bits in between."""
    if fuses(rows) and total.dtype == torch.float32 and total.is_contiguous():
        add_column_sums(total, rows)
    else:
        total.add_(rows.sum(0))


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """``total += left @ right``, in one kernel where all types are equal or the device can widen.

    A GPU adds the fp32 sums of 16-bit operands to an fp32 total, as Megatron-LM's fused gradient accumulation does; so
    does, in bf16, a CPU with AMX or one that is slow in bf16. Elsewhere the product is rounded to 16 bits first, a
    relative error of 2e-3 in bf16: to widen the operands instead took 2.5 to 4 times as long there.
    """
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    elif can_widen(left, total.dtype):
        torch.ops.aten.addmm.dtype_out(total, left, right, total.dtype, out=total)
    elif can_add(total, left, right):
        add_wide_product(total, left, right)
    elif total.dtype == torch.float32 and _is_slow(left):
        total.addmm_(left.float(), right.float())
    else:
        total.add_(left @ right)


def widening_pays(rows: Tensor) -> bool:
    """Whether ``rows`` [*, i] times a matrix takes less time in fp32, though operands must be widened first."""
    return rows.numel() >= _ENOUGH_ROWS * rows.shape[-1] and _is_slow(rows)


def _is_slow(operand: Tensor) -> bool:
    return operand.dtype == torch.bfloat16 and on_cpu(operand) and _SLOW_IN_BF16


def _slow_in_bf16() -> bool:
    """Whether this CPU multiplies bf16 matrices slower than fp32 ones.

    Without 16-bit products it takes 4 to 7 times as long. With those of AVX-512 it should take half as long, and so it
    does on AMD's; Intel's take twice as long, and are what is left where a virtual machine hides AMX.
    """
    try:
        matrices, products = torch.cpu._is_amx_tile_supported(), torch.cpu._is_avx512_bf16_supported()
    except AttributeError:  # private to torch, which may rename them
        return False
    return platform.machine() == "x86_64" and not matrices and (not products or _maker() == "GenuineIntel")


def _maker() -> str:
    """The vendor of the first processor. The rest is not read: with many processors the kernel is slow to list them."""
    with suppress(OSError), Path("/proc/cpuinfo").open(encoding="utf-8") as described:
        for line in described:
            if line.startswith("vendor_id"):
                return line.partition(":")[2].strip()
    return ""


#: Found once, since a graph that is being compiled cannot ask the processor.
_SLOW_IN_BF16 = _slow_in_bf16()


def can_widen(operand: Tensor, wide: torch.dtype) -> bool:
    """Whether torch adds a product of such operands to a ``wide`` total on their device."""
    if stands_for_gpu(operand):
        return widens_by_hardware(operand.dtype, wide)
    return _widens(device_type(operand), operand.dtype, wide)


@cache
def _widens(device: str, narrow: torch.dtype, wide: torch.dtype) -> bool:
    """Whether a product of ``narrow`` operands can be added to a ``wide`` total there, found by trying."""
    ones = torch.ones((16, 16), dtype=narrow, device=device)
    total = torch.ones((16, 16), dtype=wide, device=device)
    try:
        torch.ops.aten.addmm.dtype_out(total, ones, ones, wide, out=total)
    except (AttributeError, NotImplementedError, RuntimeError):
        return False
    return bool((total == 17).all())
