"""Description and initialisation of a chunk's parameters, from the ``parameter_specs`` of its modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from megatron_run.contracts import Init, ParameterSpec, ParamInfo, Part
from megatron_run_engine.runtime.rng import initial_generator

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torch import Tensor, nn
    from torch.nn import Parameter

    from megatron_run.contracts import Chunk

#: Reads a box of a logical tensor: its name, where the box starts, and its sizes.
ReadBox = Callable[[str, tuple[int, ...], tuple[int, ...]], "Tensor"]
#: The child that is a layer of the factory below (``ParallelLayers``).
_WRAPPED = "base"


def describe_parameters(chunk: Chunk, tensor_rank: int = 0) -> dict[Parameter, ParamInfo]:
    """Describe every parameter of ``chunk``, in the order of its modules.

    The module's ``parameter_specs`` take precedence. Without a spec, a 1-D ``weight`` starts as ones and any other 1-D
    parameter as zeros; for a matrix without a spec this raises TypeError. A parameter that every tensor-parallel rank
    holds whole is counted on the first rank only, so that the gradient norm includes it once.
    """
    infos: dict[Parameter, ParamInfo] = {}
    for place, module in chunk.named_modules():
        path = canonical(place)
        specs: dict[str, ParameterSpec] = getattr(module, "parameter_specs", {})
        for name, parameter in module.named_parameters(recurse=False):
            if parameter not in infos:
                spec = specs.get(name) or _default_spec(path, name, parameter)
                infos[parameter] = _info(path, name, parameter, spec, tensor_rank)
    return infos


def canonical(path: str) -> str:
    """The prefix of names for the module at ``path``: a layer in another stands as ``base`` where that one does."""
    return ".".join(name for name in path.split(".") if name != _WRAPPED)


def shapes_of(infos: Iterable[Mapping[Parameter, ParamInfo]]) -> dict[str, tuple[int, ...]]:
    """Return the global shapes of the logical tensors of which ``infos`` describe parts."""
    return {part.name: part.shape for described in infos for info in described.values() for part in info.parts}


def trained(infos: dict[Parameter, ParamInfo]) -> dict[Parameter, ParamInfo]:
    """Those of ``infos`` that are not frozen."""
    return {parameter: info for parameter, info in infos.items() if parameter.requires_grad}


def frozen(infos: dict[Parameter, ParamInfo]) -> dict[Parameter, ParamInfo]:
    """Those of ``infos`` that are."""
    return {parameter: info for parameter, info in infos.items() if not parameter.requires_grad}


@torch.no_grad()
def fill(infos: dict[Parameter, ParamInfo], read: ReadBox) -> None:
    """Copy each part of each parameter from the box of the logical tensor that it holds; padding becomes zero."""
    for parameter, info in infos.items():
        parameter.zero_()
        for part in info.parts:
            rows = parameter[part.local.start : part.local.stop]
            starts = (part.start, *((part.column, *(0,) * (rows.ndim - 2)) if rows.ndim > 1 else ()))
            if len(rows):  # a rank may hold nothing but padding
                rows.copy_(read(part.name, starts, tuple(rows.shape)))


def has_memory(parameter: Tensor) -> bool:
    """Whether ``parameter`` has values: not on the meta device, nor where its optimizer is still to give it memory."""
    return parameter.device.type != "meta" and parameter.untyped_storage().nbytes() >= parameter.nbytes


def without_memory(infos: Mapping[Parameter, ParamInfo]) -> dict[Parameter, ParamInfo]:
    """Those of ``infos`` that have no values yet."""
    return {parameter: info for parameter, info in infos.items() if not has_memory(parameter)}


def take_memory(tensor: Tensor) -> None:
    """Take the memory of ``tensor``, and of all that shares its storage: nobody needs the values."""
    if tensor.device.type != "meta":
        tensor.untyped_storage().resize_(0)


def give_memory(tensors: Iterable[Tensor]) -> None:
    """Give uninitialised memory to each of ``tensors``, which covers its storage."""
    for tensor in tensors:
        if tensor.device.type != "meta":
            tensor.untyped_storage().resize_(tensor.nbytes)


def unspecified(module: nn.Module) -> str:
    """The path of the first parameter of ``module`` without a ``parameter_specs`` entry; empty if all have one.

    As in :func:`describe_parameters`, the spec of a shared parameter is that of the first module that owns it.
    """
    seen: set[Parameter] = set()
    for path, each in module.named_modules():
        specs: dict[str, ParameterSpec] = getattr(each, "parameter_specs", {})
        for name, parameter in each.named_parameters(recurse=False):
            if name not in specs and parameter not in seen:
                return f"{path}.{name}".lstrip(".")
            seen.add(parameter)
    return ""


def initialise(infos: dict[Parameter, ParamInfo], seed: int) -> None:
    """Fill every parameter that has memory from its :class:`Init`; the values depend only on seed and name."""
    for parameter, info in infos.items():
        if not has_memory(parameter):
            continue
        with torch.no_grad():
            parameter.zero_()  # padding, which no part covers, must be zero
            for part in info.parts:
                _fill(parameter, part, info.init, seed)


def count_parameters(infos: Iterable[ParamInfo]) -> int:
    """Number of values in the counted logical tensors described by ``infos``, padding excluded."""
    shapes = {part.name: part.shape for info in infos if info.counted for part in info.parts}
    return sum(torch.Size(shape).numel() for shape in shapes.values())


def _default_spec(path: str, name: str, parameter: Parameter) -> ParameterSpec:
    if parameter.ndim > 1:
        raise TypeError(f"{path}.{name} has no parameter_specs entry: a matrix must declare its initial values")
    return ParameterSpec(Init("ones" if name == "weight" else "zeros"))


def _info(path: str, name: str, parameter: Parameter, spec: ParameterSpec, tensor_rank: int) -> ParamInfo:
    full = spec.name or f"{path}.{name}"
    prefix = full.rpartition(".")[0]
    parts = tuple(
        Part(f"{prefix}.{part.name}", part.shape, part.local, part.start, part.column) for part in spec.parts
    ) or (Part(full, tuple(parameter.shape), range(parameter.shape[0])),)
    decays = parameter.ndim > 1 and not name.endswith("bias")
    return ParamInfo(
        name=full,
        parts=parts,
        init=spec.init,
        decay=decays if spec.decay is None else spec.decay,
        partial_over=spec.partial_over,
        tie=spec.tie,
        replicas=spec.replicas,
        moved=spec.moved,
        row_factors=spec.row_factors,
        counted=spec.counted and (tensor_rank == 0 or not _is_whole(parameter, parts)),
    )


def _is_whole(parameter: Parameter, parts: tuple[Part, ...]) -> bool:
    """Whether ``parameter`` holds its logical tensors from the first row and column to the last."""
    columns = parameter.shape[1:]
    return all(part.shape == (len(part.local), *columns) for part in parts)


def initial_values(part: Part, init: Init, seed: int) -> Tensor:
    """The whole logical tensor of ``part``, in fp32 on the CPU: every layout and device takes its piece of it."""
    if init.kind in ("zeros", "ones"):
        return torch.full(part.shape, 1.0 if init.kind == "ones" else 0.0)
    whole, generator = torch.empty(part.shape), initial_generator(seed, part.name)
    if init.kind == "normal":
        return whole.normal_(0.0, init.std, generator=generator)
    bound = init.std * 3**0.5  # the variance of a uniform distribution is a third of its bound's square
    return whole.uniform_(-bound, bound, generator=generator)


def _fill(parameter: Parameter, part: Part, init: Init, seed: int) -> None:
    """Fill the rows of ``part``; the caller has disabled gradients."""
    rows = parameter[part.local.start : part.local.stop]
    if init.kind in ("zeros", "ones"):
        rows.fill_(1.0 if init.kind == "ones" else 0.0)
        return
    piece = initial_values(part, init, seed)[part.start : part.start + len(part.local)]
    rows.copy_(piece if piece.ndim == 1 else piece[:, part.column : part.column + rows.shape[1]])
