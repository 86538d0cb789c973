"""Gradients of queries, keys and values are joined exactly, whatever their layouts: by Triton's interpreter, on a GPU.

All of what is interpreted runs in one process, once for the file.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_run_engine.nn.fused import join_heads, split_heads
from tests.support.interpreted import interpreted

TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
#: Sequence and micro batch.
S, B = 3, 2
#: Heads and their size of each part: grouped keys and values, after rotary positions, sizes that are no powers of two
#: and unlike each other (latent attention), and more heads than one program copies.
SHAPES = (
    ((4, 16), (2, 16), (2, 16)),
    ((6, 16), (2, 16)),
    ((3, 10), (1, 10), (1, 10)),
    ((1, 48), (1, 6)),
    ((150, 16), (5, 16), (70, 16)),
)


def part(heads: int, size: int, seed: int) -> Tensor:
    """[s, b, n, d]."""
    return torch.randn(S, B, heads, size, generator=torch.Generator().manual_seed(seed))


#: What a part is laid out as: each makes from [s, b, n, d] the same values with other strides.
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x.contiguous(),
    "heads outermost, as of [b, n, s, d]": lambda x: x.permute(1, 2, 0, 3).contiguous().permute(2, 0, 1, 3),
    "texts outermost, as of [b, s, n, d]": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "within wider rows": lambda x: torch.cat((x, x, x), dim=-1)[..., x.shape[-1] : 2 * x.shape[-1]],
    "features outermost": lambda x: x.permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0),
    "one value for all": lambda x: x[:1, :1, :1, :1].expand(x.shape),
}


def given(dtype: str, shapes: Any, layout: str, device: str = "cpu") -> list[Tensor]:
    """The parts."""
    made = [part(heads, size, seed).to(device, TYPES[dtype]) for seed, (heads, size) in enumerate(shapes)]
    return [LAYOUTS[layout](each) for each in made]


CASES: list[tuple[str, Any, str]] = [(dtype, SHAPES[0], layout) for dtype in TYPES for layout in LAYOUTS]
CASES += [("bf16", shapes, layout) for shapes in SHAPES[1:] for layout in LAYOUTS]
#: Each layout, each type and each shape: those that the interpreter runs every time.
FEW = [
    case for case in CASES if [case[0] == "bf16", case[1] == SHAPES[0], case[2] == "within wider rows"].count(True) >= 2
]


def joined(case: tuple[str, Any, str], device: str = "cpu") -> Tensor:
    """The parts joined by the kernel."""
    return join_heads(*given(*case, device))


def joined_all(cases: list[tuple[str, Any, str]]) -> list[Tensor]:
    return [joined(case) for case in cases]


def expected(case: tuple[str, Any, str]) -> Tensor:
    return torch.cat([each.flatten(2) for each in given(*case)], dim=-1)


class _Names(TorchDispatchMode):
    """The operations that ran."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def through_split(present: tuple[bool, ...], device: str = "cpu") -> tuple[list[Tensor], Tensor | None, list[str]]:
    """The parts of a projection, its gradient from those parts that are ``present``, and the backward's operations."""
    shapes = SHAPES[0]
    x = torch.cat([each.flatten(2) for each in given("fp32", shapes, "contiguous", device)], dim=-1).requires_grad_()
    parts = split_heads(x, shapes)
    chosen = [each for each, there in zip(parts, present, strict=True) if there]
    with _Names() as ran:
        (gradient,) = torch.autograd.grad([each.square().sum() for each in chosen], [x], allow_unused=True)
    return [each.detach() for each in parts], gradient, ran.names


PRESENT = ((True, True, True), (True, False, True), (False, False, True))


def distant(device: str = "cpu") -> tuple[Tensor, Tensor]:
    """The last of 65 heads that lie outermost, 2^31 values from the first: itself, and where the kernel puts it."""
    step = 2**25
    wide = torch.empty(64 * step + 16, dtype=torch.float16, device=device)  # pages that nobody writes take no memory
    heads = wide.as_strided((1, 1, 65, 16), (0, 0, step, 1))
    heads.copy_(torch.randn(1, 1, 65, 16, generator=torch.Generator().manual_seed(1)))
    return heads[0, 0, -1].clone(), join_heads(heads[:, :, :1], heads)[0, 0, -16:]


def everything() -> dict[str, Any]:
    """All that is interpreted."""
    return {
        "joined": joined_all(FEW),
        "split": [through_split(present) for present in PRESENT],
        "empty": join_heads(torch.empty(0, 2, 3, 4), torch.empty(0, 2, 1, 4)),
        "distant": distant(),
    }


def check_joined(found: Tensor, case: tuple[str, Any, str]) -> None:
    assert found.is_contiguous()
    assert torch.equal(found.cpu(), expected(case))


def check_split(found: tuple[list[Tensor], Tensor | None, list[str]], present: tuple[bool, ...]) -> None:
    parts, gradient, ran = found
    assert gradient is not None
    exact = given("fp32", SHAPES[0], "contiguous")
    assert all(map(torch.equal, (each.cpu() for each in parts), exact))
    slopes = [2 * each * there for each, there in zip(exact, present, strict=True)]
    assert torch.equal(gradient.cpu(), torch.cat([each.flatten(2) for each in slopes], dim=-1))
    assert ran.count("megatron_run_engine::join_heads") == 1
    assert not any(name.startswith(("aten::cat", "aten::slice_backward", "aten::add")) for name in ran)


@pytest.mark.multiproc
class TestInterpreted:
    @pytest.mark.parametrize("case", FEW, ids=str)
    def test_parts_of_any_layout_are_joined_exactly(self, found: dict[str, Any], case: Any) -> None:
        check_joined(found["joined"][FEW.index(case)], case)

    @pytest.mark.nightly
    def test_parts_of_each_type_and_shape_are_joined_exactly(self) -> None:
        for case, result in zip(CASES, interpreted(joined_all, CASES), strict=True):
            check_joined(result, case)

    @pytest.mark.parametrize("present", PRESENT, ids=str)
    def test_the_gradient_of_a_split_is_joined_in_one_operation(self, found: dict[str, Any], present: Any) -> None:
        check_split(found["split"][PRESENT.index(present)], present)

    def test_no_tokens_are_no_launch(self, found: dict[str, Any]) -> None:
        assert found["empty"].shape == (0, 2, 16)

    def test_heads_beyond_32_bit_offsets_are_joined(self, found: dict[str, Any]) -> None:
        assert torch.equal(*found["distant"])


@pytest.mark.gpu
class TestOnGpu:
    def test_parts_of_any_layout_are_joined_exactly(self) -> None:
        for case in CASES:
            check_joined(joined(case, "cuda"), case)

    def test_the_gradient_of_a_split_is_joined_in_one_operation(self) -> None:
        for present in PRESENT:
            check_split(through_split(present, "cuda"), present)

    def test_heads_beyond_32_bit_offsets_are_joined(self) -> None:
        assert torch.equal(*distant("cuda"))


def test_without_kernels_a_split_leaves_views_and_pytorch_joins_their_gradients() -> None:
    parts, gradient, ran = through_split((True, True, True))
    assert gradient is not None
    assert not parts[0].is_contiguous()
    assert "megatron_run_engine::join_heads" not in ran
    assert torch.equal(gradient, 2 * torch.cat([each.flatten(2) for each in parts], dim=-1))
