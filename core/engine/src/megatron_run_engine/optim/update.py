"""Applies an update rule to stretches of shards, and rounds what it has updated to parameters.

Master weights and the rule's state are saved and loaded here too, as boxes of logical tensors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatron_run.contracts import MASTER, StatePiece
from megatron_run_engine.optim.one_pass import one_pass_of
from megatron_run_engine.optim.rule_memory import GROUP, GroupNumbers, ListsFields, RuleWatch, restored, saved_form
from megatron_run_engine.optim.sharding import give_values
from megatron_run_engine.optim.stretches import Hyperparameters, Stretch
from megatron_run_engine.runtime.comm import ALONE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    import torch

    from megatron_run.contracts import ParamInfo, ReadState
    from megatron_run_engine.optim.gradients import Gradients
    from megatron_run_engine.optim.sharding import Piece, Shard
    from megatron_run_engine.optim.update_rules import UpdateOptions, UpdateRule
    from megatron_run_engine.runtime.comm import ParallelGroup


class Update:
    """Applies ``rule``, which ``options`` select, to ``shards``. ``warn`` is told what no saved step would hold.

    ``peers`` are the tensor-parallel ranks: they hold parts of matrices that a rule may need whole.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        rule: UpdateRule,
        options: UpdateOptions,
        device: torch.device,
        warn: Callable[[str], None],
        peers: ParallelGroup = ALONE,
    ) -> None:
        self.shards, self._rule, self._options, self._device = shards, rule, options, device
        self._begun = False
        cut = self._whole_tensors if self._rule.whole else self._runs
        self.stretches = tuple(stretch for shard in shards for stretch in cut(shard))
        rules = {False: self._rule, True: self._rule.rest}
        self._optimizers = [
            rule.make(groups, device)
            for by_rest, rule in rules.items()
            if rule is not None and (groups := self._groups(by_rest=by_rest))
        ]
        if rule.whole and peers.size > 1:
            self._put_together(peers)
        self._scaled = [scaled for shard in shards for scaled in _scaled_rows(shard)]
        # Rules for whole tensors, and what they leave to others, begin anywhere in a bucket.
        alone = len(self._optimizers) == 1 and not rule.whole and not self._scaled
        self._one_pass = one_pass_of(rule, self._optimizers[0], self.stretches, device) if alone else None
        self._numbers = [GroupNumbers(optimizer) for optimizer in self._optimizers]
        pairs = zip(self._optimizers, self._numbers, strict=True) if rule.imported else ()
        self._watches = [RuleWatch(rule.imported, optimizer, numbers, warn) for optimizer, numbers in pairs]

    def _put_together(self, peers: ParallelGroup) -> None:
        """Let the rule put matrices together of which ``peers`` hold parts."""
        from megatron_run_engine.optim.split_muon import SplitMuon

        for optimizer in self._optimizers:
            if isinstance(optimizer, SplitMuon):
                own = {parameter for group in optimizer.param_groups for parameter in group["params"]}
                parts = {each.values: each.part for each in self.stretches if each.values in own and each.part}
                optimizer.split(parts, peers)

    def step(self, lr: float, weight_decay: float, gradients: Gradients) -> None:
        """Update every stretch and round it to parameters; ``weight_decay`` applies to those that decay.

        ``gradients`` are those of all stretches. What they are still to be multiplied by, fused rules multiply by.
        """
        if self._one_pass is not None:
            self._begun = True
            self._one_pass.step(lr, weight_decay, gradients.factor)
            return
        if not all(map(self._rule.divides, self._optimizers)):
            gradients.settle()
        self.apply(lr, weight_decay, gradients.factor)
        gradients.arrived()  # fused rules write back what they have multiplied
        give_values(self.shards)

    def apply(self, lr: float, weight_decay: float, factor: Tensor | None = None) -> None:
        """Update every stretch by its gradient times ``factor``, and leave the parameters as they are."""
        self._step(lr, weight_decay, factor)
        with torch.no_grad():
            for masters, factors in self._scaled:
                masters.mul_(factors.to(masters.device))
        for watch in self._watches:
            watch.after_step()

    def _step(self, lr: float, weight_decay: float, factor: Tensor | None = None) -> None:
        self._begun = True
        # torch's fused rules divide by this, as its GradScaler has it.
        divisor = None if factor is None else factor.double().reciprocal().float()
        for optimizer in self._optimizers:
            if divisor is not None:
                vars(optimizer)["grad_scale"] = divisor
            for group in optimizer.param_groups:
                # torch's optimizers read both from their groups in every step.
                group["lr"] = lr * group["megatron_run"].lr_mult
                group["weight_decay"] = weight_decay if group["megatron_run"].decays else 0.0
            optimizer.step()
            if divisor is not None:
                del vars(optimizer)["grad_scale"]

    def allocate_state(self) -> None:
        """Make the rule allocate its state by a step with zero gradients and learning rate; reset its counts.

        PyTorch's optimizers create their state only in ``step``. For a rule that ``starts_at_zero`` the result is its
        initial state; for others the values are meaningless until they are loaded.
        """
        for shard in self.shards:
            shard.grads.zero_()  # left over from the last step, perhaps not finite
        self._step(0.0, 0.0)
        for numbers in self._numbers:
            numbers.reset()
        for stretch in self.stretches:
            state = self._state(stretch)
            if "step" in state:
                # In place: it may be a tensor, whose device and dtype the rule chose, or a number.
                state["step"] *= 0

    def drop_state(self) -> None:
        """Drop the rule's state, as before the first step."""
        self._begun = False
        for optimizer, numbers in zip(self._optimizers, self._numbers, strict=True):
            optimizer.state.clear()
            numbers.reset()
        if self._one_pass is not None:
            self._one_pass.forget()

    def create_initial_state(self) -> None:
        """Create the rule's initial state before the first step, if it is known."""
        if not self._begun and self._rule.starts_at_zero:
            self.allocate_state()

    def state(self, stretch: Stretch) -> dict[str, Any]:
        """The rule's state of ``stretch`` by field, as PyTorch holds it."""
        return {field: value for field, value in self._state(stretch).items() if value is not None}

    def set_state(self, stretch: Stretch, field: str, value: Any) -> None:
        """Replace a number of the rule's state, or give it what it had not; other tensors are written into."""
        # A rule that made nothing of this tensor in its first step is imported, and has no ``rest``.
        (self._state(stretch) or self._optimizers[0].state[stretch.values])[field] = value

    def numbers(self, stretch: Stretch) -> dict[str, Any]:
        """Values that steps have changed in the group of ``stretch``, by field."""
        found = [numbers.changed(stretch.values) for numbers in self._numbers]
        return {GROUP + key: value for each in found for key, value in each.items() if value is not None}

    def set_number(self, stretch: Stretch, field: str, saved: Tensor) -> None:
        """Give the group of ``stretch`` a number that :meth:`numbers` had."""
        for numbers in self._numbers:
            numbers.set(stretch.values, field.removeprefix(GROUP), saved)

    @property
    def imported(self) -> bool:
        """Whether the rule is of the user's, whose state may grow with time."""
        return bool(self._rule.imported)

    def _state(self, stretch: Stretch) -> dict[str, Any]:
        return next((each.state[stretch.values] for each in self._optimizers if stretch.values in each.state), {})

    def state_bytes(self) -> int | None:
        """Bytes of the rule's state, on the meta device after a step; None for a rule that cannot step there."""
        if self._device.type == "meta":
            try:
                self.allocate_state()
            except RuntimeError:  # raised by torch for a rule that reads values
                return None
        states = (self.state(stretch).values() for stretch in self.stretches)
        return sum(value.nbytes for values in states for value in values if isinstance(value, Tensor))

    def _groups(self, *, by_rest: bool) -> list[dict[str, Any]]:
        members = [stretch for stretch in self.stretches if stretch.group.by_rest == by_rest]
        return [
            {"params": [stretch.values for stretch in members if stretch.group == group], "megatron_run": group}
            for group in dict.fromkeys(stretch.group for stretch in members)
        ]

    def _group(self, info: ParamInfo, *, by_rest: bool = False) -> Hyperparameters:
        return Hyperparameters(info.decay, self._options.factor(info.name), by_rest)

    def _runs(self, shard: Shard) -> Iterator[Stretch]:
        """The longest ranges of one group."""
        for group, in_bucket in shard.runs(self._group, shard.updated):
            yield Stretch.of(shard, in_bucket, group)

    def _whole_tensors(self, shard: Shard) -> Iterator[Stretch]:
        """One stretch per logical tensor; a bucket cut for whole tensors has a single owner (``build_buckets``)."""
        if not shard.updated:
            return
        for parameter, info in shard.bucket.infos.items():
            row, columns = parameter.shape[1:].numel(), parameter.shape[1:]
            for part in info.parts:
                start = shard.bucket.starts[parameter] + part.local.start * row
                by_rest = len(part.shape) != 2 or self._options.is_left_to_adamw(part.name)  # not a hidden matrix
                group = self._group(info, by_rest=by_rest and self._rule.rest is not None)
                in_bucket = range(start, start + len(part.local) * row)
                yield Stretch.of(shard, in_bucket, group, (len(part.local), *columns), part)


def _scaled_rows(shard: Shard) -> Iterator[tuple[Tensor, Tensor]]:
    """The masters of each piece whose rows are multiplied after an update, and the factors, which broadcast to them."""
    for piece in shard.pieces(shard.updated):
        if (factors := piece.info.row_factors) is not None:
            first = piece.part.local.start + piece.starts[0] - piece.part.start
            rows = factors[first : first + piece.sizes[0]].view(-1, *(1 for _ in piece.sizes[1:]))
            yield shard.masters[shard.local(piece.in_bucket)].view(piece.sizes), rows


def iter_state(update: Update) -> Iterator[StatePiece]:
    """The state that this rank owns; a field of a whole logical tensor belongs to the owner of its first value.

    A run may be saved before its first update. An imported rule (``MODULE:CLASS``) then has master weights only, since
    its initial state is not known.
    """
    update.create_initial_state()
    for stretch in update.stretches:
        shard, state = stretch.shard, update.state(stretch)
        owned = range(max(stretch.in_bucket.start, shard.owned.start), min(stretch.in_bucket.stop, shard.owned.stop))
        for piece in shard.pieces(owned):
            if not piece.info.counted:
                continue
            for field, flat in _by_value(stretch, state).items():
                box = flat[_within(stretch, piece)].view(piece.sizes)
                yield StatePiece(piece.part.name, field, piece.starts, piece.sizes, box)
            if piece.is_first:
                # Over all ranks one piece of a logical tensor is the first, so the field is saved once.
                for field, value in {**_of_the_whole(stretch, state), **update.numbers(stretch)}.items():
                    tensor = saved_form(value)
                    yield StatePiece(piece.part.name, field, (0,) * tensor.ndim, tuple(tensor.shape), tensor)


def load_state(update: Update, read: ReadState) -> None:
    """Fill master weights and state of every stretch from the boxes that ``read`` looks up.

    A rule of the user's may have made state after its first step, which a step with zero gradients does not allocate:
    it is made as it was saved, if ``read`` lists what was.
    """
    if update.imported:
        update.drop_state()  # a run that goes back a few steps must not keep what it had not made by then
    update.allocate_state()
    _fill(update, read)
    if update.imported and isinstance(read, ListsFields):
        for stretch in update.stretches:
            _make_the_rest(update, stretch, read)


def load_weights(update: Update, read: ReadState) -> None:
    """Fill the master weights of every stretch from the boxes that ``read`` looks up, and drop the rule's state."""
    update.drop_state()
    _fill(update, read)


@torch.no_grad()
def _fill(update: Update, read: ReadState) -> None:
    """Fill the master weights, and the state if the rule has any."""
    for stretch in update.stretches:
        state = update.state(stretch)
        for index, piece in enumerate(stretch.shard.pieces(stretch.in_bucket)):
            for field, flat in _by_value(stretch, state).items():
                flat[_within(stretch, piece)].copy_(read(piece.part.name, field, piece.starts, piece.sizes).flatten())
            if index == 0:  # equal for all logical tensors of a stretch, since they are updated together
                _load_whole_fields(update, stretch, piece.part.name, read)


def _make_the_rest(update: Update, stretch: Stretch, read: ReadState) -> None:
    """Make the saved fields that a first step does not. An imported rule's stretch is one box of a logical tensor."""
    assert isinstance(read, ListsFields)
    made = update.state(stretch).keys() | {MASTER}
    for piece in stretch.shard.pieces(stretch.in_bucket):
        for field, shape in read.shapes(piece.part.name).items():
            if field in made:
                continue
            whole = shape != piece.part.shape
            box = ((0,) * len(shape), shape) if whole else (piece.starts, piece.sizes)
            saved = read(piece.part.name, field, *box)
            if field.startswith(GROUP):
                update.set_number(stretch, field, saved)
            else:
                update.set_state(stretch, field, restored(saved, stretch.values.device))


def _load_whole_fields(update: Update, stretch: Stretch, name: str, read: ReadState) -> None:
    for field, value in _of_the_whole(stretch, update.state(stretch)).items():
        if isinstance(value, Tensor):
            value.copy_(read(name, field, (0,) * value.ndim, tuple(value.shape)))
        else:
            update.set_state(stretch, field, restored(read(name, field, (), ()), stretch.values.device, value))


def _by_value(stretch: Stretch, state: Mapping[str, Any]) -> dict[str, Tensor]:
    """The fields with one number for each value of ``stretch``, the master weights among them, flat."""
    elementwise = {field: value for field, value in state.items() if _is_elementwise(stretch, value)}
    return {field: tensor.detach().view(-1) for field, tensor in {MASTER: stretch.values, **elementwise}.items()}


def _of_the_whole(stretch: Stretch, state: Mapping[str, Any]) -> dict[str, Any]:
    """The other fields: counters, and tensors of any other shape."""
    return {field: value for field, value in state.items() if not _is_elementwise(stretch, value)}


def _is_elementwise(stretch: Stretch, value: Any) -> bool:
    return isinstance(value, Tensor) and value.shape == stretch.values.shape


def _within(stretch: Stretch, piece: Piece) -> slice:
    return slice(piece.in_bucket.start - stretch.in_bucket.start, piece.in_bucket.stop - stretch.in_bucket.start)
