"""The conformance suite of kind ``model``: the network must not depend on its cut into chunks. One process.

Legend: s sequence, b micro batch, h hidden, v vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from math import isclose

import torch
from pydantic import BaseModel
from torch import Tensor, nn

from megatron_run.contracts import Microbatch
from megatron_run.contracts.data import FIELDS, Field, as_fields
from megatron_run.contracts.schedule import LayoutSpec, looped_layout
from megatron_run_engine.builtin.parallel_layer.dense import DenseLayers
from megatron_run_testing import Check, CheckFailed
from megatron_run_testing.build_contexts import (
    example_microbatch,
    logical_values,
    single_process_context,
)
from megatron_run_testing.model.built import Built, CreateModel, build_model
from megatron_run_testing.model.check_costs import check_costs
from megatron_run_testing.model.check_saved import check_saved
from megatron_run_testing.model.half_sequence import HalfSequence
from megatron_run_testing.model.slopes import check_slopes
from megatron_run_testing.model.without_dropout import WithoutDropout, without_dropout

__all__ = ["Built", "CreateModel", "build_model", "model_checks"]

#: (stages, chunks) in which the model is cut.
_CUTS = ((1, 1), (2, 1), (1, 2), (2, 2), (4, 1))
#: The fields of all data, those of data that packs documents, and their bounds in two rows: [2, c].
_PLAIN = frozenset({"tokens", "labels", "loss_mask"})
_PACKED = _PLAIN | {"positions", "documents"}
_DOCUMENTS = ((0, 5, 6, 14, 16), (0, 16, 16, 16, 16))


def model_checks(create: CreateModel, options: BaseModel) -> tuple[Check, ...]:
    """The checks that every model must pass, built from dense layers in float64.

    ``options`` describe a small network with ``vocab_size`` set; it is cut into up to four chunks. A field that the
    model declares itself, beyond those of all data, holds random token ids.
    """
    bench = _Bench(create, options)
    checks: dict[str, Callable[[], str | None]] = {
        "a cut model equals the whole model": bench.cuts_agree,
        "initial weights do not depend on the layout": bench.initial_weights_agree,
        "gradients are those of the loss": bench.slopes_agree,
        "training without dropout has the loss of evaluation": bench.modes_agree,
        "recomputation changes no gradient": bench.recomputation_agrees,
        "evaluation has no dropout": bench.evaluation_is_still,
        "masked labels have no weight": bench.mask_counts,
        "without labels it returns logits": bench.gives_logits,
        "it needs known fields only": bench.asks_known_fields,
        "packed documents do not see each other": bench.packs,
        "tensors between chunks match boundary": bench.boundary_holds,
        "tensors between chunks match boundary under sequence parallelism": bench.boundary_splits,
        "segments cover every parameter": bench.segments_cover,
        "chunks of one stage share tied parameters": bench.shares_tied,
        "costs are those of the layers": bench.costs_are_told,
        "a layer saves what its costs tell": bench.saved_is_told,
    }
    return tuple(Check(name, run) for name, run in checks.items())


@dataclass
class _Bench:
    create: CreateModel
    options: BaseModel

    def built(self, stages: int = 1, chunks: int = 1, fields: frozenset[str] = _PLAIN, **train: object) -> Built:
        """A new model in training mode, for data that has ``fields``."""
        context = replace(single_process_context(self.options, train=train), fields=fields)
        built = build_model(self.create, context, self.options, stages, chunks)
        return built.train(mode=True)

    def still(self) -> Built:
        """The whole model in training mode, without dropout and smoothed labels."""
        options = without_dropout(self.options)
        context = replace(single_process_context(options), fields=_PLAIN)
        built = build_model(self.create, context, options, layers=WithoutDropout(DenseLayers(context)))
        return built.train(mode=True)

    def microbatch(self, **changes: object) -> Microbatch:
        """Two samples of 16 tokens."""
        vocab: int = getattr(self.options, "vocab_size")  # noqa: B009  # unknown to types
        microbatch, generator = example_microbatch(vocab), torch.Generator().manual_seed(1)
        fields = dict(microbatch.fields)
        for field in self.own_fields:
            sizes = [16 if size == "s" else size or 1 for size in field.shape]
            drawn = torch.randint(vocab, (2, *sizes), generator=generator).to(getattr(torch, field.dtype))
            fields[field.name] = drawn.to(fields["tokens"].device)
        return replace(microbatch, fields=fields, **changes)  # type: ignore[arg-type]  # fields of Microbatch

    @cached_property
    def own_fields(self) -> tuple[Field, ...]:
        """The fields that the model declares itself, for data that has those of all data, in order."""
        context = replace(single_process_context(self.options), fields=_PLAIN)
        model, layout = self.create(context, self.options), looped_layout(LayoutSpec(1, 1, 1))
        return tuple(field for field in as_fields(model.fields(0, layout)) if field.name not in FIELDS)

    def cuts_agree(self) -> None:
        """Loss and gradients equal those of the uncut model bit for bit.

        Sums over several places may be rounded differently: a tied tensor's gradient, auxiliary losses, and the
        gradients of all that comes before a tensor which several chunks read.
        """
        whole = self.built()
        loss, gradients = whole.step(self.microbatch())
        shared = whole.model.boundary(replace(self.microbatch(), fields={}), 2, 16).beside
        for stages, chunks in _CUTS[1:]:
            built = self.built(stages, chunks)
            tied = {part.name for info in built.infos.values() if info.tie for part in info.parts}
            found, found_gradients = built.step(self.microbatch())
            cut = f"{stages} stages x {chunks} chunks"
            _equal(f"{cut}: loss", found, loss, 1e-12 if len(built.model.metric_names) > 1 else 0.0)
            _same_names(cut, found_gradients, gradients)
            for name, gradient in gradients.items():
                tolerance = 1e-12 if name in tied or shared else 0.0
                _equal(f"{cut}: gradient of {name}", found_gradients[name], gradient, tolerance)

    def initial_weights_agree(self) -> None:
        """Names, shapes and values of all logical tensors are equal for every cut."""
        whole = logical_values(self.built().infos)
        for stages, chunks in _CUTS[1:]:
            found = logical_values(self.built(stages, chunks).infos)
            _same_names(f"{stages} stages x {chunks} chunks", found, whole)
            for name, value in whole.items():
                _equal(f"{stages} stages x {chunks} chunks: {name}", found[name], value)

    def slopes_agree(self) -> str:
        """The loss changes with the parameters as its gradients say.

        Auxiliary losses are left out: the balance of experts deliberately has another gradient than its value.
        """
        built = self.still()
        drawn = self._draws(built)  # of no use to a difference, unless the mode of evaluation turns it off
        built, microbatch = built.train(mode=not drawn), self.microbatch(train=not drawn)
        names = {parameter: info.name for parameter, info in built.infos.items()}
        return check_slopes(lambda: built.forward(microbatch)[0].losses["lm"][0], names)

    def modes_agree(self) -> str:
        """Without dropout and smoothed labels, training and evaluation compute the same loss."""
        built = self.still()
        if self._draws(built):
            return "it draws random numbers in training without dropout too"
        training, evaluation = (self._loss(built, train=train) for train in (True, False))
        if not isclose(training, evaluation, rel_tol=1e-9):
            raise CheckFailed(
                f"of the same samples the loss is {training:.6g} in training, {evaluation:.6g} in evaluation"
            )
        return ""

    def _loss(self, built: Built, *, train: bool, step: int = 1) -> float:
        microbatch = self.microbatch(train=train, step=step)
        return built.train(mode=train).forward(microbatch)[0].losses["lm"][0].item()

    def _draws(self, built: Built) -> bool:
        """Whether training draws random numbers, and so has another loss of the same samples in another step."""
        return len({self._loss(built, train=True, step=step) for step in (1, 2, 3, 4)}) > 1

    def recomputation_agrees(self) -> None:
        """train.recompute=full gives the same bits, dropout included."""
        loss, gradients = self.built().step(self.microbatch())
        found, found_gradients = self.built(recompute="full").step(self.microbatch())
        _equal("recompute=full: loss", found, loss)
        for name, gradient in gradients.items():
            _equal(f"recompute=full: gradient of {name}", found_gradients[name], gradient)

    def evaluation_is_still(self) -> None:
        """Two evaluations at different random positions give the same loss."""
        built = self.built().train(mode=False)
        losses = [
            built.forward(self.microbatch(train=False, sample0=sample0))[0].losses["lm"][0] for sample0 in (0, 64)
        ]
        _equal("loss of a second evaluation", losses[1], losses[0])

    def mask_counts(self) -> None:
        """The weight is the number of unmasked labels, as ``Model.counts`` says, and a masked label changes nothing."""
        built, microbatch = self.built(), self.microbatch()
        mask = microbatch.fields["loss_mask"]
        total, weight = built.forward(microbatch)[0].losses["lm"]
        _equal("weight of the loss", weight.double(), mask.sum().double())
        _equal("Model.counts of the loss", built.model.counts(microbatch.fields)["lm"].double(), weight.double())
        labels = torch.where(mask > 0, microbatch.fields["labels"], 0)
        changed = replace(microbatch, fields={**microbatch.fields, "labels": labels})
        _equal("loss after changing masked labels", built.forward(changed)[0].losses["lm"][0], total)

    def gives_logits(self) -> None:
        """Logits are [s, b, p], and their cross entropy is the loss that the model computes from labels."""
        built, microbatch = self.built().train(mode=False), self.microbatch(train=False)
        given = {name: x for name, x in microbatch.fields.items() if name not in ("labels", "loss_mask")}
        logits = built.forward(replace(microbatch, fields=given))[0].logits
        vocab: int = getattr(self.options, "vocab_size")  # noqa: B009  # unknown to types
        if logits is None or logits.shape[:2] != (16, 2) or logits.shape[2] < vocab:
            found = None if logits is None else tuple(logits.shape)
            raise CheckFailed(f"logits {found}, expected {(16, 2, vocab)}, or more columns where they are padded")
        labels, mask = microbatch.fields["labels"], microbatch.fields["loss_mask"]
        loss = nn.functional.cross_entropy(
            logits[..., :vocab].permute(1, 2, 0).double(), labels, reduction="none"
        )  # [b, s]
        _equal("loss", built.forward(microbatch)[0].losses["lm"][0].double(), (loss * mask).sum(), 1e-9)

    def asks_known_fields(self) -> None:
        """Fields are known; the first position takes tokens, the last one labels and loss_mask."""
        for stages, chunks in _CUTS:
            built = self.built(stages, chunks)
            asked = [built.asked(position) for position in range(len(built.layout))]
            unknown = set().union(*asked) - _PLAIN - {field.name for field in self.own_fields}
            if unknown or "tokens" not in asked[0] or not {"labels", "loss_mask"} <= asked[-1]:
                raise CheckFailed(f"{stages} stages x {chunks} chunks: fields by position are {asked}")

    def packs(self) -> str:
        """Where data packs documents, loss and gradients are those of the documents alone, in every cut."""
        microbatch = self.microbatch(train=False)
        device = microbatch.fields["tokens"].device
        spans = [(row, a, b) for row, bounds in enumerate(_DOCUMENTS) for a, b in pairwise(bounds) if a < b]
        positions = torch.stack([torch.cat([torch.arange(b - a) for a, b in pairwise(row)]) for row in _DOCUMENTS])
        borders = {"documents": torch.tensor(_DOCUMENTS, device=device), "positions": positions.to(device)}
        packed = replace(microbatch, fields={**microbatch.fields, **borders})
        alone = self.built().train(mode=False)
        if "documents" not in self.built(fields=_PACKED).asked(0):
            return "it does not ask for documents, so data that packs them is refused"
        if self._rows_compete(alone, microbatch):
            return "rows of one batch change each other, as where experts have a capacity"
        total = torch.zeros((), dtype=torch.float64, device=device)
        for row, start, stop in spans:  # gradients add up in the buffers of the model
            fields = {name: field[row : row + 1, start:stop] for name, field in microbatch.fields.items()}
            loss, gradients = alone.step(replace(microbatch, fields=fields))
            total += loss
        for stages, chunks in _CUTS:
            found, found_gradients = self.built(stages, chunks, _PACKED).train(mode=False).step(packed)
            cut = f"{stages} stages x {chunks} chunks, packed"
            _equal(f"{cut}: loss", found, total, 1e-9)
            for name, gradient in gradients.items():
                _equal(f"{cut}: gradient of {name}", found_gradients[name], gradient, 1e-9)
        return ""

    def _rows_compete(self, built: Built, microbatch: Microbatch) -> bool:
        """Whether the loss of two rows together is another than that of each alone."""
        rows = ({name: x[part] for name, x in microbatch.fields.items()} for part in (slice(2), slice(1), slice(1, 2)))
        both, a, b = (built.forward(replace(microbatch, fields=row))[0].losses["lm"][0] for row in rows)
        return not torch.allclose(both, a + b, rtol=1e-9)

    def boundary_holds(self) -> None:
        """Every tensor between two positions has the shape and dtype of ``boundary``."""
        self._compare_boundary(self.built(4))

    def boundary_splits(self) -> None:
        """The same holds on the first of two ranks that split the sequence."""
        context = replace(single_process_context(self.options), sequence_shards=2)
        layers = HalfSequence(DenseLayers(context))
        try:
            self._compare_boundary(build_model(self.create, context, self.options, 4, layers=layers))
        except CheckFailed as failure:
            raise CheckFailed(f"where context.sequence_shards is 2, {failure}") from None

    def _compare_boundary(self, built: Built) -> None:
        microbatch = self.microbatch()
        boundary = built.model.boundary(replace(microbatch, fields={}), 2, 16)  # as the engine asks
        for position, out in enumerate(built.forward(microbatch)[1]):
            assert out.x is not None  # it crossed
            if out.beside.keys() != boundary.beside.keys():
                names = [sorted(each) for each in (out.beside, boundary.beside)]
                raise CheckFailed(f"position {position} sends {names[0]} beside x, boundary declares {names[1]}")
            for name, declared in zip(("x", *boundary.beside), boundary.tensors, strict=True):
                x = out.beside.get(name, out.x)
                if not declared.fits(x):
                    what = f"position {position} sends {f'{name} ' if out.beside else ''}{tuple(x.shape)} {x.dtype}"
                    raise CheckFailed(f"{what}, boundary declares {declared}")

    def segments_cover(self) -> None:
        """Every parameter is read by a segment, and (layer, index) identifies a segment."""
        built = self.built(2, 2)
        segments = [segment for chunk in built.chunks for segment in chunk.segments()]
        places = [(segment.layer, segment.index) for segment in segments]
        if len(set(places)) != len(places):
            raise CheckFailed(f"two segments share a place in the random stream: {sorted(places)}")
        read = {parameter for segment in segments for parameter in segment.params}
        missed = [info.name for parameter, info in built.infos.items() if parameter not in read]
        if missed:
            raise CheckFailed(f"no segment reads {', '.join(missed)}")

    def shares_tied(self) -> None:
        """On one stage a logical tensor has one Parameter; of copies on two stages exactly one counts."""
        one = [part.name for info in self.built(1, 2).infos.values() for part in info.parts]
        if len(one) != len(set(one)):
            raise CheckFailed(f"one stage holds two copies of {sorted({name for name in one if one.count(name) > 1})}")
        counted = [info.name for info in self.built(2, 1).infos.values() if info.counted]
        every = {info.name for info in self.built(2, 1).infos.values()}
        if sorted(counted) != sorted(every):
            raise CheckFailed(f"counted once each: {sorted(every)}; found {sorted(counted)}")

    def costs_are_told(self) -> None:
        """Weights are those of the matrices that are built; FLOPs are some, and grow with the sequence."""
        built = self.built()
        check_costs(self.options, built.infos.values(), type(built.model))

    def saved_is_told(self) -> str:
        """Each layer leaves about as many values for the backward as its costs tell."""

        def build(stages: int) -> Built:
            context = single_process_context(self.options, dtype=torch.bfloat16, device="cpu")
            return build_model(self.create, context, self.options, stages)

        return check_saved(build, self.microbatch(train=False), self.options)


def _same_names(where: str, found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    if found.keys() != expected.keys():
        difference = sorted(found.keys() ^ expected.keys())
        raise CheckFailed(f"{where}: these logical tensors exist on one side only: {', '.join(difference)}")


def _equal(what: str, found: Tensor, expected: Tensor, tolerance: float = 0.0) -> None:
    try:
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    except AssertionError as difference:
        raise CheckFailed(f"{what}: {str(difference).splitlines()[0]}") from difference
