"""Prediction of further tokens against the whole model written out in plain torch, in float64."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_run.config.values import nested
from megatron_run.contracts import Microbatch
from megatron_run_model_deepseek import DeepSeek, DeepSeekOptions
from megatron_run_model_deepseek.prediction import MTP_LOSS
from megatron_run_testing import Check
from megatron_run_testing.build_contexts import example_microbatch, logical_values, single_process_context
from megatron_run_testing.model import Built, build_model, model_checks
from tests.support import plain_gpt, plain_moe
from tests.support.plain_gpt import Weights
from tests.support.training_bench import Bench, gradients_of_one_step

HEADS, ROPE, NOPE, VALUE, COEFFICIENT = 4, 4, 6, 8, 0.3
OPTIONS: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 24,
    "num_heads": HEADS,
    "ffn_size": 20,
    "vocab_size": 61,
    "init_std": 0.3,
    "kv_rank": 12,
    "query_rank": 8,
    "rope_head_size": ROPE,
    "nope_head_size": NOPE,
    "value_head_size": VALUE,
    "mtp_layers": 2,
    "mtp_loss_coeff": COEFFICIENT,
}
#: Layer 0 is dense; layer 1 and both predictors have experts.
EXPERTS: dict[str, Any] = {
    "experts.count": 4,
    "experts.ffn_size": 12,
    "experts.layer_first": 1,
    "experts.shared.ffn_size": 16,
    "experts.router.score_function": "sigmoid",
    "experts.aux_loss_coeff": 0.0,
}
#: Bounds of the documents of two rows of 16 tokens.
PREDICTED = ("predictors.1.block", "predictors.2.block")
DOCUMENTS = torch.tensor([[0, 5, 12, 16], [0, 1, 15, 16]])


def deepseek(given: dict[str, Any], *fields: str) -> tuple[DeepSeekOptions, Built]:
    options = DeepSeekOptions.model_validate(nested({**OPTIONS, **given}))
    context = single_process_context(options)
    context = replace(context, fields=context.fields | {*fields})
    return options, build_model(lambda context, _: DeepSeek(context, options), context, options)


def packed() -> Microbatch:
    plain = example_microbatch(61)
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in DOCUMENTS.diff(dim=1).tolist()])
    return replace(plain, fields={**plain.fields, "documents": DOCUMENTS, "positions": positions})


def written_out(weights: Weights, fields: dict[str, Tensor], options: Any) -> tuple[Tensor, list[Tensor]]:
    """The summed loss of the next tokens, and the mean loss of each depth: document by document."""
    lm, depths = written_out_sums(weights, fields, options)
    return lm, [total / count for total, count in depths]


def written_out_sums(
    weights: Weights, fields: dict[str, Tensor], options: Any
) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    """As :func:`written_out`, of each depth the sum and the number of tokens that count."""
    labels, mask = fields["labels"], fields["loss_mask"]
    rows = fields.get("documents", torch.tensor([[0, labels.shape[1]]]).expand(len(labels), 2))
    head = weights["embedding.word.weight" if options.tie_embeddings else "output.weight"].T
    lm, depths = torch.zeros((), dtype=torch.float64), list[list[tuple[Tensor, Tensor]]]()
    depths = [[] for _ in range(options.mtp_layers)]
    for row, bounds in enumerate(rows.tolist()):
        for start, stop in pairwise(bounds):
            targets, counted = labels[row, start:stop], mask[row, start:stop]
            x = weights["embedding.word.weight"][fields["tokens"][row : row + 1, start:stop]]
            for layer in range(options.num_layers):
                x = block(within(weights, f"layers.{layer}."), x, options)
            found = losses(plain_gpt.norm(weights, "final_norm", x, options) @ head, targets, options)
            lm = lm + (found * counted).sum()
            for depth in range(1, options.mtp_layers + 1):
                own = within(weights, f"predictors.{depth}.")
                x = x[:, :-1]  # the last one has no token to be given
                given = weights["embedding.word.weight"][targets[depth - 1 : -1]][None]
                both = [
                    plain_gpt.norm(own, "stream_norm", x, options),
                    plain_gpt.norm(own, "token_norm", given, options),
                ]
                x = block(within(own, "block."), torch.cat(both, -1) @ own["join.weight"].T, options)
                found = losses(plain_gpt.norm(own, "final_norm", x, options) @ head, targets[depth:], options)
                depths[depth - 1].append(((found * counted[depth:]).sum(), counted[depth:].sum()))
    return lm, sums(depths)


def sums(depths: list[list[tuple[Tensor, Tensor]]]) -> list[tuple[Tensor, Tensor]]:
    """The sum of losses and the number of tokens that count, by depth."""
    return [(torch.stack([a for a, _ in each]).sum(), torch.stack([b for _, b in each]).sum()) for each in depths]


def within(weights: Weights, prefix: str) -> Weights:
    return {name.removeprefix(prefix): weight for name, weight in weights.items() if name.startswith(prefix)}


def losses(products: Tensor, targets: Tensor, options: Any) -> Tensor:
    logits = plain_gpt.capped(options.logits_scale * products[0], options.logits_softcap)
    each, share = -torch.log_softmax(logits, -1), options.label_smoothing
    found: Tensor = (1 - share) * each.gather(-1, targets[:, None])[:, 0] + share * each.mean(-1)
    return found


def block(own: Weights, x: Tensor, options: Any) -> Tensor:
    x = x + attention(own, plain_gpt.norm(own, "attention.norm", x, options), options)
    if not x.shape[1]:
        return x
    if "moe.norm.weight" in own:
        return x + plain_moe.mixture(within(own, "moe."), plain_gpt.norm(own, "moe.norm", x, options), options).out
    return x + plain_gpt.mlp(own, plain_gpt.norm(own, "mlp.input.norm", x, options), options)


def attention(own: Weights, y: Tensor, options: Any) -> Tensor:
    """One head at a time, [1, s, h]."""
    down = y @ own["attention.query_down.weight"].T
    queries = plain_gpt.norm(own, "attention.query.norm", down, options) @ own["attention.query.query.weight"].T
    latent = y @ own["attention.latent.weight"].T
    turned = plain_gpt.rotate(latent[..., 12:], options.rope.theta)
    latent = plain_gpt.norm(own, "attention.key_value.norm", latent[..., :12], options)
    keys, values = (latent @ own[f"attention.key_value.{name}.weight"].T for name in ("key", "value"))
    hidden = torch.ones(y.shape[1], y.shape[1]).triu(1).bool()
    heads = []
    for head in range(HEADS):
        q = queries[..., head * (ROPE + NOPE) : (head + 1) * (ROPE + NOPE)]
        q = torch.cat((plain_gpt.rotate(q[..., :ROPE], options.rope.theta), q[..., ROPE:]), -1)
        k = torch.cat((turned, keys[..., head * NOPE : (head + 1) * NOPE]), -1)
        scores = (q @ k.transpose(1, 2) / (ROPE + NOPE) ** 0.5).masked_fill(hidden, -torch.inf)
        heads.append(torch.softmax(scores, -1) @ values[..., head * VALUE : (head + 1) * VALUE])
    return torch.cat(heads, -1) @ own["attention.output.weight"].T


@pytest.mark.parametrize(
    "given",
    [
        {"tie_embeddings": False},
        {"tie_embeddings": True},
        {"logits_scale": 0.5, "logits_softcap": 4.0},
        {"logits_scale": 2.0, "label_smoothing": 0.2},
        {"logits_scale": 2.0, "label_smoothing": 0.2, "loss_chunks": 2},
        EXPERTS,
    ],
    ids=["untied", "tied", "capped", "smooth", "chunks", "experts"],
)
@pytest.mark.parametrize("rows", ["whole", "packed"])
def test_losses_and_every_gradient_are_those_of_plain_torch(rows: str, given: dict[str, Any]) -> None:
    microbatch = packed() if rows == "packed" else example_microbatch(61)
    fields = ("documents", "positions") if rows == "packed" else ()
    options, built = deepseek(given, *fields)
    weights = plain_gpt.leaves(logical_values(built.infos))
    lm, means = written_out(weights, dict(microbatch.fields), options)
    (lm + COEFFICIENT * torch.stack(means).mean()).backward()
    total, gradients = built.step(microbatch)
    torch.testing.assert_close(total, (lm + COEFFICIENT * torch.stack(means).mean()).detach())
    assert gradients.keys() == weights.keys()
    for name, weight in weights.items():
        assert weight.grad is not None, name
        torch.testing.assert_close(gradients[name], weight.grad, msg=f"the gradient of {name} differs")


@pytest.mark.parametrize("loss_mean", ["microbatch", "token"])
def test_every_loss_of_a_batch_is_divided_by_its_own_count(tmp_path: Path, loss_mean: str) -> None:
    """Against plain torch in float64: masks leave the depths unequal numbers of tokens, in unequal microbatches."""
    given = {key: value for key, value in OPTIONS.items() if key != "vocab_size"}
    sets = (
        "model.use=deepseek",
        *(f"model.{key}={value}" for key, value in given.items()),
        "model.tie_embeddings=false",
    )
    bench = Bench(
        tmp_path, *sets, "train.steps=1", "eval.interval=0", "train.clip_norm=0", f"train.loss_mean={loss_mean}"
    )
    options: Any = bench.run.one("model").with_options(bench.assembly.context.model).options
    weights = {name: weight.double().requires_grad_() for name, weight in logical_values(bench.infos).items()}
    found, microbatches = gradients_of_one_step(bench, (0.9, 0.2, 0.6, 0.35))
    parts = [written_out_sums(weights, fields, options) for fields in microbatches]
    losses = [
        [(lm, fields["loss_mask"].sum()), *further] for (lm, further), fields in zip(parts, microbatches, strict=True)
    ]
    shares = [1.0, COEFFICIENT / 2, COEFFICIENT / 2]
    for share, each in zip(shares, zip(*losses, strict=True), strict=True):
        totals, counts = (torch.stack(list(values)) for values in zip(*each, strict=True))
        mean = totals.sum() / counts.sum() if loss_mean == "token" else (totals / counts).mean()
        (share * mean).backward(retain_graph=True)
    assert found.keys() == weights.keys()
    for name, gradient in found.items():
        expected = weights[name].grad
        assert expected is not None
        error = (gradient - expected).norm() / expected.norm().clamp(min=1e-3)
        assert error < 1e-4, f"{name}: off by {error:.1e} of its norm"


def test_the_mean_at_each_depth_is_reported_in_training_alone() -> None:
    options, built = deepseek({})
    microbatch = example_microbatch(61)
    _, means = written_out(logical_values(built.infos), dict(microbatch.fields), options)
    assert abs(means[0] - means[1]) > 1e-3
    out, _ = built.forward(microbatch)
    assert out.losses.keys() == set(built.model.metric_names) == {"lm", MTP_LOSS, f"{MTP_LOSS}_2"}
    for name, mean in zip((MTP_LOSS, f"{MTP_LOSS}_2"), means, strict=True):
        total, weight = out.losses[name]
        torch.testing.assert_close(total / weight, mean)
    assert built.forward(replace(microbatch, train=False))[0].losses.keys() == {"lm"}


def test_routers_of_predictors_are_balanced_and_reported_with_the_others() -> None:
    _, built = deepseek({**EXPERTS, "experts.router.bias_rate": 0.5, "experts.aux_loss_coeff": 0.01})
    out, _ = built.forward(example_microbatch(61))
    total, weight = out.losses["model/balance_loss"]
    assert float(weight) == pytest.approx(0.01 * 3), "layer 1 and two predictors"
    assert total / weight > 0.9
    built.model.before_update(skipped=False)
    biases = {name: value for name, value in logical_values(built.infos).items() if "expert_bias" in name}
    assert biases.keys() == {f"{each}.moe.router.expert_bias" for each in ("layers.1", *PREDICTED)}
    assert all(value.abs().max() == 0.5 for value in biases.values())


def test_floating_point_operations_count_the_matrices_of_one_token() -> None:
    """Six a parameter: of experts those of a token, and the output layer once for each prediction."""
    options, built = deepseek({**EXPERTS, "experts.count": 2, "experts.top_k": 2})
    flops = options.costs(16, 61).flops_per_token
    matrices = sum(p.numel() for p, info in built.infos.items() if p.ndim > 1 and "word" not in info.name)
    padding = sum(len(p) - 61 for p, info in built.infos.items() if info.name == "output.weight") * 24
    products = 4 * 16 * HEADS * (ROPE + NOPE + VALUE)  # of two layers and two predictors
    assert flops == pytest.approx(6 * (matrices - padding + 2 * 61 * 24 + products))


@pytest.mark.parametrize(
    "check",
    model_checks(DeepSeek, DeepSeekOptions.model_validate(nested({**OPTIONS, "num_layers": 4, "dropout": 0.1}))),  # type: ignore[arg-type]  # it takes its own options
    ids=lambda check: check.name,
)
def test_conforms(check: Check) -> None:
    check.run()
