"""A product of FP8 matrices that is added to an fp32 total in the kernel, which no operation of torch does.

torch's own product returns its sums, and another kernel adds them: 16 bytes for each value of a weight instead of 8.
cuBLASLt adds them itself. It is called in the library that torch has loaded, with torch's handle and stream.

Legend: m, n rows and columns of the total, k terms of each sum.
"""

from __future__ import annotations

import ctypes
from ctypes import byref
from functools import cache
from threading import Lock

import torch
from torch import Tensor

# Numbers of cublasLt.h and library_types.h, which never change.
_FP32, _COMPUTE_FP32, _TRANSPOSED = 0, 68, 1
_TYPES = {torch.float8_e4m3fn: 28, torch.float8_e5m2: 29}
_TRANSPOSE_A, _SCALE_OF_A, _SCALE_OF_B = 3, 17, 18  # of a product
_MOST_WORKSPACE = 1  # of a preference
#: What kernels of Hopper ask for at most, as NVIDIA recommends.
_WORKSPACE = 32 * 2**20


class _Found(ctypes.Structure):
    """``cublasLtMatmulHeuristicResult_t``."""

    _fields_ = (
        ("algorithm", ctypes.c_uint64 * 8),
        ("workspace", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


def add_product(total: Tensor, left: Tensor, left_scale: Tensor, right: Tensor, right_scale: Tensor) -> bool:
    """``total += (left * left_scale) @ (right * right_scale).T``, partial sums in fp32; False where it cannot.

    ``total`` [m, n] is fp32; ``left`` [m, k] and ``right`` [n, k] are FP8, one of them in E4M3. All are contiguous, and
    each scale is one number on the device.
    """
    if total.dtype != torch.float32 or not total.is_contiguous() or not _works(total.device):
        return False
    return _add(total, left, left_scale, right, right_scale)


@cache
def _works(device: torch.device) -> bool:
    """Whether the library is there and adds what it should, found by trying."""
    total = torch.ones((16, 32), device=device)
    left, right = (torch.full((rows, 64), 2.0, device=device) for rows in (16, 32))
    one, half = (torch.full((1, 1), value, device=device) for value in (1.0, 0.5))
    try:
        done = _add(total, left.to(torch.float8_e5m2), half, right.to(torch.float8_e4m3fn), one)
    except (AttributeError, OSError, RuntimeError):
        return False
    return done and bool((total == 1 + 64 * 2).all())


def _add(total: Tensor, left: Tensor, left_scale: Tensor, right: Tensor, right_scale: Tensor) -> bool:
    # cuBLAS counts columns first: to it the total is its transpose [n, m], and ``right`` the left factor.
    sizes = (total.shape[1], total.shape[0], left.shape[1])
    with torch.cuda.device_of(total):  # the handle is that of the current device
        plan = _plan(right.dtype, left.dtype, sizes)
        if plan is not None:
            plan.run(total, right, right_scale, left, left_scale)
    return plan is not None


class _Plan:
    """A product of one shape, with the kernel that cuBLASLt chose for it. Raises RuntimeError where it has none."""

    def __init__(self, a: torch.dtype, b: torch.dtype, sizes: tuple[int, int, int]) -> None:
        m, n, k = sizes
        self._library, self._lock = _library(), Lock()
        self._product = self._made("MatmulDesc", _COMPUTE_FP32, _FP32)
        self._set(_TRANSPOSE_A, ctypes.c_int32(_TRANSPOSED))
        self._a = self._layout(_TYPES[a], k, m)
        self._b = self._layout(_TYPES[b], k, n)
        self._total = self._layout(_FP32, m, n)
        preference = self._made("MatmulPreference")
        most = ctypes.c_uint64(_WORKSPACE)
        self._check("MatmulPreferenceSetAttribute", preference, _MOST_WORKSPACE, byref(most), ctypes.c_size_t(8))
        self._found, count = _Found(), ctypes.c_int()
        layouts = (self._a, self._b, self._total, self._total)
        asked = (self._product, *layouts, preference, 1, byref(self._found), byref(count))
        self._check("MatmulAlgoGetHeuristic", _handle(), *asked)
        self._check("MatmulPreferenceDestroy", preference)
        if not count.value or self._found.state:
            raise RuntimeError("cuBLASLt has no kernel for this product")

    def run(self, total: Tensor, a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor) -> None:
        """Launch it on torch's stream."""
        one = ctypes.c_float(1.0)
        workspace = torch.empty(self._found.workspace, dtype=torch.uint8, device=total.device)
        stream = ctypes.c_void_p(torch.cuda.current_stream(total.device).cuda_stream)
        with self._lock:  # the product holds the scales' addresses until it is launched
            self._set(_SCALE_OF_A, _address(a_scale))
            self._set(_SCALE_OF_B, _address(b_scale))
            factors = (byref(one), _address(a), self._a, _address(b), self._b)
            totals = (byref(one), _address(total), self._total, _address(total), self._total)
            chosen = (byref(self._found.algorithm), _address(workspace), ctypes.c_size_t(self._found.workspace))
            self._check("Matmul", _handle(), self._product, *factors, *totals, *chosen, stream)

    def _layout(self, kind: int, rows: int, columns: int) -> ctypes.c_void_p:
        sizes = ctypes.c_uint64(rows), ctypes.c_uint64(columns), ctypes.c_int64(rows)
        return self._made("MatrixLayout", kind, *sizes)

    def _made(self, what: str, *arguments: object) -> ctypes.c_void_p:
        made = ctypes.c_void_p()
        self._check(f"{what}Create", byref(made), *arguments)
        return made

    def _set(self, attribute: int, value: ctypes.c_int32 | ctypes.c_void_p) -> None:
        size = ctypes.c_size_t(ctypes.sizeof(value))
        self._check("MatmulDescSetAttribute", self._product, attribute, byref(value), size)

    def _check(self, function: str, *arguments: object) -> None:
        status = getattr(self._library, f"cublasLt{function}")(*arguments)
        if status:
            raise RuntimeError(f"cublasLt{function} returned {status}")


@cache
def _plan(a: torch.dtype, b: torch.dtype, sizes: tuple[int, int, int]) -> _Plan | None:
    """The plan of a shape which lives as long as the process; None where the library has no kernel."""
    try:
        return _Plan(a, b, sizes)
    except RuntimeError:
        return None


@cache
def _library() -> ctypes.CDLL:
    """The library of the name that torch has loaded."""
    return ctypes.CDLL(f"libcublasLt.so.{(torch.version.cuda or '').partition('.')[0]}")


def _handle() -> ctypes.c_void_p:
    """The handle of this thread and device: one of cuBLAS is one of cuBLASLt too."""
    return ctypes.c_void_p(torch.cuda.current_blas_handle())


def _address(tensor: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())
