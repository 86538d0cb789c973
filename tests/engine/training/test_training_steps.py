"""What a training run promises beyond its losses: determinism, skips, guards, ramp-up, stopping."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from megatron_run.config.request import Found, Request
from megatron_run.contracts import Microbatch
from megatron_run.contracts.topology import Sizes
from megatron_run.errors import DataError, ExitCode, GuardError, InputError, PluginError
from megatron_run.planning import load_config, resolve
from megatron_run.planning.batch_size import BatchSizes
from megatron_run.planning.learning_rate import LearningRate
from megatron_run_engine.evaluation.evaluator import Evaluator
from megatron_run_engine.evaluation.sample_losses import _microbatch
from megatron_run_engine.runtime.losses import Losses
from megatron_run_engine.runtime.metrics import Metrics
from megatron_run_engine.training.build import with_vocabulary
from megatron_run_engine.training.checked_plugins import open_split
from megatron_run_testing.build_contexts import logical_values
from tests.support import plain_gpt
from tests.support.training_bench import Bench, gradients_of_one_step

#: As many samples a step as the preset has, in fewer operations: for what does not depend on the network's size.
TINY = ("model.num_layers=1", "model.hidden_size=16", "train.sequence_length=8", "train.micro_batch_size=4")


def test_two_runs_of_one_configuration_give_identical_numbers(tmp_path: Path) -> None:
    first, second = (Bench(tmp_path, *TINY, "model.dropout=0.1", "train.steps=5") for _ in range(2))
    first.train()
    second.train()
    for one, other in zip(first.watch.steps, second.watch.steps, strict=True):
        assert (one.loss, one.grad_norm, one.lr, one.samples) == (other.loss, other.grad_norm, other.lr, other.samples)
    assert first.watch.evaluations == second.watch.evaluations


def test_another_seed_gives_other_losses(tmp_path: Path) -> None:
    losses = []
    for seed in (1, 2):
        bench = Bench(tmp_path, *TINY, f"train.seed={seed}", "train.steps=1")
        bench.train()
        losses.append(bench.watch.steps[0].loss)
    assert losses[0] != losses[1]


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_a_non_finite_gradient_skips_the_step_and_the_learning_rate_waits(tmp_path: Path, value: float) -> None:
    bench = Bench(tmp_path, *TINY, "train.steps=4")
    bench.spoil(value, {2})
    before: list[torch.Tensor] = []
    bench.watch.after_step = lambda: before.append(bench.weights())
    bench.train()
    steps = bench.watch.steps
    assert [m.skipped for m in steps] == [False, True, False, False]
    assert [m.skipped_total for m in steps] == [0, 1, 1, 1]
    assert steps[1].grad_norm is None
    assert torch.equal(before[0], before[1])
    assert not torch.equal(before[1], before[2])
    rate = LearningRate.from_config(bench.run.config.train)
    assert [m.lr for m in steps] == [rate.at(samples) for samples in (0, 8, 8, 16)]
    assert [m.samples for m in steps] == [8, 16, 24, 32]


def test_skips_in_a_row_stop_the_run_with_advice(tmp_path: Path) -> None:
    bench = Bench(tmp_path, *TINY, "train.steps=9", "train.max_skips=3")
    bench.spoil(float("nan"), {2, 4, 5, 6})
    with pytest.raises(GuardError, match=r"3 steps in a row were skipped.*last at step 6.*lower train.lr") as caught:
        bench.train()
    assert caught.value.exit_code == 6
    assert len(bench.watch.steps) == 6


def test_the_batch_ramps_up_and_the_data_goes_on_without_a_gap(tmp_path: Path) -> None:
    ramp = ("train.ramp_up.start=2", "train.ramp_up.increment=2", "train.ramp_up.samples=12")
    bench = Bench(tmp_path, "train.steps=6", *ramp)
    bench.train()
    sizes = BatchSizes(bench.run.config.train, 1)
    assert [m.microbatches for m in bench.watch.steps] == [1, 1, 2, 3, 4, 4]
    assert bench.read == [sizes.consumed_at(step) for step in range(6)]
    assert bench.watch.steps[-1].samples == sizes.consumed_at(6)


def test_a_request_to_stop_ends_after_the_step_with_its_code(tmp_path: Path) -> None:
    bench = Bench(tmp_path, *TINY, "train.steps=9")
    bench.stop.stop(ExitCode.SIGTERM)
    assert bench.train() is ExitCode.SIGTERM
    assert len(bench.watch.steps) == 1


def test_evaluation_comes_at_its_interval_and_at_the_end_and_changes_nothing(tmp_path: Path) -> None:
    often, never = (Bench(tmp_path, *TINY, "train.steps=5", f"eval.interval={interval}") for interval in (2, 0))
    often.train()
    never.train()
    assert [e.step for e in often.watch.evaluations] == [2, 4, 5]
    assert [e.step for e in never.watch.evaluations] == [5]
    assert often.watch.evaluations[-1] == never.watch.evaluations[-1]
    assert [m.loss for m in often.watch.steps] == [m.loss for m in never.watch.steps]


def test_evaluation_is_the_mean_over_its_samples_by_the_bare_model(tmp_path: Path) -> None:
    bench = Bench(tmp_path, "train.steps=1", "model.dropout=0.3")
    (evaluation,) = (bench.train(), bench.watch.evaluations)[1]
    dataset = bench.assembly.data.dataset("validation", 32, 1234)
    (chunk,) = bench.assembly.chunks
    chunk.train(False)
    total = 0.0
    for index in bench.trainer.validation_samples:
        fields = {name: torch.as_tensor(value)[None] for name, value in dataset[index].items()}
        with torch.no_grad():
            total += chunk(None, Microbatch(0, 0, 0, fields, train=False)).losses["lm"][0].item()
    assert evaluation.tokens == 32 * len(bench.trainer.validation_samples) == 32 * 2 * 8
    assert evaluation.loss == pytest.approx(total / evaluation.tokens, abs=1e-5)


def test_a_split_smaller_than_a_batch_is_scored_whole_by_every_layout(tmp_path: Path) -> None:
    """Data parallelism deals out microbatches: what their size does not change, the number of ranks does not."""
    evaluations = []
    for size in (1, 2, 4, 8):
        bench = Bench(tmp_path, "train.steps=1", "data.samples=5", f"train.micro_batch_size={size}", "train.lr=1e-9")
        bench.train()
        assert sorted(bench.trainer.validation_samples) == [0, 1, 2, 3, 4]
        evaluations += bench.watch.evaluations
    assert [each.tokens for each in evaluations] == [5 * 32] * 4
    assert [each.loss for each in evaluations] == pytest.approx([evaluations[0].loss] * 4, abs=1e-5)


def test_a_rank_beyond_the_last_sample_gets_samples_that_do_not_count(tmp_path: Path) -> None:
    bench = Bench(tmp_path, "data.samples=5")
    network = bench.assembly.network
    dataset = bench.assembly.data.dataset("validation", 32, 0)
    counted = 0.0
    for rank in range(2):
        topology = replace(network.context.topology, sizes=Sizes(data=2), rank=rank)
        here = replace(network, context=replace(network.context, topology=topology))
        for index in range(2):
            counted += _microbatch(here, dataset, range(5), 2, index).fields["loss_mask"].sum().item()
    assert counted == 5 * 32


def test_a_run_without_validation_trains_and_evaluates_nothing(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("def f(): pass\n" * 200)
    bench = Bench(tmp_path, "data.use=text", f"data.paths={tmp_path / 'a.txt'}", "data.split=100,0,0", "train.steps=2")
    assert bench.train() is ExitCode.DONE
    assert len(bench.watch.steps) == 2
    assert bench.watch.evaluations == []
    assert any("nothing is evaluated" in notice for notice in bench.run.notices)
    assert bench.assembly.data.baselines(32, 0, bench.trainer.validation_samples) == {}


def test_a_sample_that_cannot_be_made_is_said(tmp_path: Path) -> None:
    bench = Bench(tmp_path, "train.steps=1", "eval.sample=3")
    bench.train()
    assert bench.watch.texts == []
    assert "eval.sample=3 generates nothing: the samples of data=mock are no text" in bench.said


def test_a_vocabulary_smaller_than_the_datas_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"model.vocab_size=100 is smaller than the data's vocabulary of 128"):
        Bench(tmp_path, "model.vocab_size=100")


def test_of_two_vocabularies_that_the_user_named_both_are_named() -> None:
    run = resolve(Request(("preset:tiny",), sets=("model.vocab_size=100", "data.vocab_size=5000")))
    with pytest.raises(InputError) as error:
        with_vocabulary(run, run.one("data").create())
    assert "vocabulary of 5000: data.vocab_size=5000, from --set data.vocab_size (from --set model.v" in str(
        error.value
    )


def test_a_vocabulary_that_weights_decide_is_not_to_be_raised() -> None:
    run = resolve(Request(("preset:tiny", Found({"model": {"vocab_size": 100}}, "what is saved in a"))))
    with pytest.raises(InputError) as error:
        with_vocabulary(run, run.one("data").create())
    assert str(error.value) == (
        "model.vocab_size=100 is smaller than the data's vocabulary of 128 (from what is saved in a); "
        "name the tokenizer that the model was trained with: --plugin data=text,tokenizer=FILE"
    )


def test_a_sample_of_text_continues_the_prompt(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("def f(): pass\n" * 200)
    sets = ("data.use=text", f"data.paths={tmp_path / 'a.txt'}", "eval.sample=12", "eval.prompt=def ", "train.steps=1")
    bench, again = Bench(tmp_path, *sets), Bench(tmp_path, *sets)
    bench.train()
    again.train()
    (text,) = bench.watch.texts
    assert text.startswith("def ")
    assert len(text.encode(errors="surrogateescape")) > 4
    assert again.watch.texts == [text]


def test_each_generated_token_is_the_likeliest_after_what_the_model_sees(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("def f(): pass\n" * 200)
    sets = (
        "data.use=text",
        f"data.paths={tmp_path / 'a.txt'}",
        "train.micro_batch_size=8",
        "train.sequence_length=8",
        "train.steps=60",
    )
    bench = Bench(tmp_path, *sets, "train.lr=1e-2", "eval.sample=12", "eval.prompt=def ", "eval.temperature=0")
    bench.train()
    (chunk,) = bench.assembly.chunks
    chunk.train(False)
    tokens, start = list(b"def "), 0
    for _ in range(12):
        start += 4 * (len(tokens) - start > 8)  # the older half is left behind when 8 positions are full
        window = torch.tensor([tokens[start:]])
        with torch.no_grad():
            logits = chunk(None, Microbatch(0, 0, 0, {"tokens": window}, train=False)).logits
        assert logits is not None
        tokens.append(int(logits[-1, 0].argmax()))
    assert len(set(tokens[4:])) > 4, "it learned to write one character only: any window would do"
    assert bench.watch.texts == [bench.assembly.data.decode(tokens)]


def test_evaluation_reads_the_same_samples_for_every_layout(tmp_path: Path) -> None:
    sets = ("data.samples=15", "train.micro_batch_size=1", "train.global_batch_size=4", "eval.batches=9")
    bench = Bench(tmp_path, *sets)
    source = bench.assembly.data
    dataset = open_split(bench.run.one("data"), source, "validation", 32, 1234)
    for ranks in (2, 4):
        run = load_config("preset:tiny", sets=sets, nproc=ranks)
        evaluator = Evaluator(run, bench.assembly.network, source, dataset, source.dataset)
        assert evaluator.samples == bench.trainer.validation_samples
    assert len(bench.trainer.validation_samples) == 12


def test_validation_samples_without_a_token_that_counts_are_named(tmp_path: Path) -> None:
    bench = Bench(tmp_path, "train.steps=1")
    chunk = cast("Any", bench.assembly.chunks[0])
    chunk._loss = lambda logits, labels, loss_mask: (logits.sum() * 0, loss_mask.sum() * 0)
    chunk._head, chunk._losses = chunk._make_head_segments(SimpleNamespace(layers=4, loss_chunks=1))
    with pytest.raises(DataError, match="hold no token that counts"):
        bench.train()


def test_an_undeclared_loss_and_a_missing_one_are_the_models_fault() -> None:
    model = SimpleNamespace(metric_names=("lm",))
    losses = Losses(cast("Any", model), Metrics(torch.device("cpu")))
    with pytest.raises(PluginError, match=r"a chunk reports the loss 'aux'; add it to Model\.metric_names"):
        losses.report(0, "aux", torch.ones(()), torch.ones(()))
    model.metric_names = ("aux",)
    with pytest.raises(PluginError, match="the model declares the losses aux"):
        Losses(cast("Any", model), Metrics(torch.device("cpu")))


#: How often a token counts in each microbatch: unequally, and in the last one never.
SHARES = (0.9, 0.2, 0.6, 0.0)


@pytest.mark.parametrize("shares", [(1.0, 1.0, 1.0, 1.0), SHARES], ids=["all", "unequal"])
@pytest.mark.parametrize("loss_mean", ["microbatch", "token"])
def test_the_first_gradients_are_those_of_plain_autograd_in_float64(
    tmp_path: Path, loss_mean: str, shares: Sequence[float]
) -> None:
    """Of the mean over microbatches of the mean over tokens, or of that over all tokens of the global batch.

    Scale and all, with nothing shared but the samples. A microbatch without a token that counts adds nothing.
    """
    bench = Bench(tmp_path, "train.steps=1", "eval.interval=0", f"train.loss_mean={loss_mean}", "train.clip_norm=0")
    options: Any = bench.run.one("model").with_options(bench.assembly.context.model).options
    weights = {name: w.double().requires_grad_() for name, w in logical_values(bench.infos).items()}
    found, microbatches = gradients_of_one_step(bench, shares)
    counts = [fields["loss_mask"].sum() for fields in microbatches]
    for fields, count in zip(microbatches, counts, strict=True):
        total = plain_gpt.loss(weights, fields["tokens"], fields["labels"], fields["loss_mask"], options)
        over = sum(counts) if loss_mean == "token" else count.clamp(min=1) * len(counts)
        (total / over).backward()

    assert found.keys() == weights.keys()
    for name, gradient in found.items():
        expected = weights[name].grad
        assert expected is not None
        error = (gradient - expected).norm() / expected.norm().clamp(min=1e-3)  # a key's bias moves nothing
        assert error < 1e-5, f"{name}: off by {error:.1e} of its norm"


def test_a_batch_without_a_token_that_counts_changes_nothing(tmp_path: Path) -> None:
    bench = Bench(tmp_path, "train.steps=1", "eval.interval=0", "train.loss_mean=token")
    found, _ = gradients_of_one_step(bench, (0.0,) * 4)
    assert found
    assert not any(gradient.any() for gradient in found.values())


def test_the_losses_of_routers_weigh_the_same_whatever_is_masked(tmp_path: Path) -> None:
    """They are means over all tokens that experts see, so loss_mean=token leaves them as they are."""

    def gradients(loss_mean: str, coefficient: float) -> dict[str, torch.Tensor]:
        sets = ("model.experts.count=4", f"model.experts.aux_loss_coeff={coefficient}", f"train.loss_mean={loss_mean}")
        return gradients_of_one_step(Bench(tmp_path, "train.steps=1", "eval.interval=0", *sets), SHARES)[0]

    alone, both = gradients("token", 0.0), gradients("token", 1.0)
    plain, balanced = gradients("microbatch", 0.0), gradients("microbatch", 1.0)
    for name, gradient in both.items():
        expected = alone[name] + balanced[name] - plain[name]
        assert torch.allclose(gradient, expected, rtol=1e-4, atol=1e-5), name
    assert any("router" in name and (gradient - alone[name]).any() for name, gradient in both.items())
