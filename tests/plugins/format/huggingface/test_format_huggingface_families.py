"""Every family of Hugging Face: random models of ``transformers`` come in, compute the same, and go out bit by bit."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from megatron_run.config.values import flat, nested
from megatron_run.contracts import Microbatch, Weights
from megatron_run.contracts.model import MAX_LAYERS
from megatron_run.errors import RunError
from megatron_run_engine.checkpoint.step_folder import Checkpoints
from megatron_run_engine.data.standalone_tokenizer import byte_tokenizer_json
from megatron_run_engine.formats import convert
from megatron_run_engine.formats.convert import read_step
from megatron_run_engine.formats.gpt_tensors import gpt_options, logical_shapes
from megatron_run_engine.runtime.generation import Window, score
from megatron_run_format_huggingface import model_folder
from megatron_run_format_huggingface.families import FAMILIES
from megatron_run_inference import load
from megatron_run_testing.model import Built
from tests.plugins.format.huggingface.family_cases import BETWEEN, CASES, COMPUTED, SMALL, SPLIT, VOCAB, YARN
from tests.plugins.format.huggingface.saving import save
from tests.support.installed import found_once
from tests.support.ranks import run_ranks
from tests.support.small_models import LENGTH, fill, logits_of, network


def theirs(
    case: str, folder: Path, dtype: torch.dtype = torch.float32, changes: Mapping[str, Any] | None = None
) -> Any:
    """A random model of transformers in which every path matters, saved in ``folder`` in this type."""
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    torch.manual_seed(2)
    config = CONFIG_MAPPING[CASES[case].family](**{**SMALL, **CASES[case].config, **(changes or {})})
    config._attn_implementation = "eager"
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
        for tensor in saved_buffers(model):
            tensor.add_(0.05 * torch.randn_like(tensor))
    save(model.to(dtype), folder)
    return model.float().eval()


def saved_buffers(model: Any) -> list[Tensor]:
    """Biases of routers, which we have as parameters."""
    return [tensor for name, tensor in model.named_buffers() if name in model.state_dict()]


def batch() -> dict[str, Tensor]:
    tokens, labels = torch.randint(VOCAB, (2, 2, LENGTH), generator=torch.Generator().manual_seed(5))
    return {"tokens": tokens, "labels": labels, "loss_mask": torch.ones(2, LENGTH)}


def model_of(weights: Weights) -> str:
    return str(weights.config["use"])


def imported(folder: Path) -> Built:
    """The network in an imported folder, with its weights."""
    checkpoints = Checkpoints(folder / "checkpoints")
    weights = read_step(checkpoints, checkpoints.steps()[-1])
    built = network(gpt_options(weights, model_of(weights)))
    fill(built, {name: read() for name, read in weights.tensors.items()})
    return built


def their_gradients(model: Any, fields: Mapping[str, Tensor], folder: Path) -> dict[str, Tensor]:
    """Of the summed loss, by the names in their files: saved in ``folder`` as if they were the weights."""
    logits = model(fields["tokens"]).logits
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), fields["labels"].flatten(), reduction="sum").backward()
    for parameter in model.parameters():
        parameter.data = parameter.grad
    save(model, folder)
    return load_file(folder / model_folder.SINGLE)


class Travelled(NamedTuple):
    """A random model of transformers, its logits of :func:`batch`, and the way that its weights took.

    In ``folder`` lie ``hf``, which transformers saved, ``ours``, imported from it, and ``again``, exported from that.
    """

    model: Any
    logits: Tensor
    folder: Path
    imported: convert.Imported


@pytest.fixture(scope="module")
def travelled(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Travelled]:
    """By case: made once for all tests, which change nothing of it."""

    @cache
    def travel(case: str) -> Travelled:
        folder = tmp_path_factory.mktemp("family")
        model = theirs(case, folder / "hf")
        tokenizer = {
            "tokenizer.json": byte_tokenizer_json(),
            "tokenizer_config.json": b'{"tokenizer_class": "PreTrainedTokenizerFast"}',
        }
        for name, content in tokenizer.items():
            (folder / "hf" / name).write_bytes(content)
        done = convert.import_model(folder / "hf", folder / "ours")
        for name in tokenizer:
            (folder / "hf" / name).unlink()  # it has more tokens than a model that is loaded may lack
        convert.export_model(folder / "ours", folder / "again", "huggingface")
        with torch.no_grad():
            logits = model(batch()["tokens"]).logits
        assert logits.std() > 0.1, "logits near zero would not tell"
        return Travelled(model, logits, folder, done)

    return travel


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.nightly] * (case not in COMPUTED)) for case in CASES]
)
def test_logits_and_gradients_are_transformers_and_weights_come_back_bit_by_bit(
    case: str, travelled: Callable[[str], Travelled], tmp_path: Path
) -> None:
    fields, family = batch(), FAMILIES[CASES[case].family]
    model, expected, folder, done = travelled(case)
    assert done.parameters == model.num_parameters() + sum(map(Tensor.numel, saved_buffers(model)))
    assert [note.partition(":")[0] for note in done.notes] == [
        f"its tokenizer has 257 ids and the model {VOCAB} rows for them"
    ]
    built = imported(folder / "ours")
    torch.testing.assert_close(logits_of(built, fields["tokens"], VOCAB), expected, rtol=1e-5, atol=1e-5)

    _, gradients = built.train(mode=True).step(Microbatch(0, 1, 0, fields))
    weights = read_step(Checkpoints(folder / "ours" / "checkpoints"), 0)
    described = gpt_options(weights, family.model)
    explicit = described.explicit()
    assert {key: explicit[key] for key in CASES[case].needs} == CASES[case].needs
    rows = family.rows(described, logical_shapes(described, LENGTH, model=family.model))
    rows = [row for row in rows if "expert_bias" not in row.logical[0]]  # no gradient moves it
    readers = {name: partial(Tensor.clone, gradient) for name, gradient in gradients.items()}
    of_theirs = their_gradients(deepcopy(model), fields, tmp_path / "gradients")
    head = f"{family.head}.weight"
    for row in rows:
        wanted = of_theirs[row.foreign if row.foreign == head else family.prefix + row.foreign]
        assert wanted.any(), f"{row.foreign} has no gradient: the test would not see an error in it"
        scale = float(wanted.abs().max())
        torch.testing.assert_close(row.pack(readers), wanted, rtol=1e-5, atol=1e-5 * max(scale, 1.0), msg=row.foreign)

    before, after = (load_file(folder / name / model_folder.SINGLE) for name in ("hf", "again"))
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items()), "no bit is lost on the way"
    kept, own = (
        json.loads(each) for each in ((folder / "again" / "tokenizer.json").read_bytes(), byte_tokenizer_json())
    )
    assert kept["model"]["vocab"] == own["model"]["vocab"]


#: What transformers computes of an export by other keys than the families' usual ones.
BY_DAY = (*SPLIT, "gemma2, without windows")
BY_NIGHT = [pytest.param(case, marks=pytest.mark.nightly) for case in CASES if case not in BY_DAY]


@pytest.mark.parametrize("case", [*BY_DAY, *BY_NIGHT])
def test_what_we_export_transformers_loads_whole_and_computes_the_same(
    case: str, travelled: Callable[[str], Travelled]
) -> None:
    from transformers import AutoModelForCausalLM

    folder = travelled(case).folder
    model, said = AutoModelForCausalLM.from_pretrained(
        folder / "again", output_loading_info=True, attn_implementation="eager"
    )
    assert not any(said.values()), "nothing is missing, left over or of another shape"
    assert model.config.model_type == CASES[case].family
    with torch.no_grad():
        found = model.eval()(batch()["tokens"]).logits
    expected = logits_of(imported(folder / "ours"), batch()["tokens"], VOCAB)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def logits_on_ranks(rank: int, world: int, folders: Sequence[str]) -> list[Tensor]:
    """By folder of transformers, the logits of tensor-parallel ranks, then those of a pipeline.

    The models of one split share its process groups, as one model after another in a process may.
    """
    from megatron_run.config.request import Request
    from megatron_run_engine.runtime import comm
    from megatron_run_engine.runtime.world import World
    from megatron_run_inference import LoadedModel
    from megatron_run_inference import network as networks
    from megatron_run_inference.source import find_source

    splits = {
        "tensor": (("parallel.tensor=2",), ("parallel-layer=tensor",)),
        "pipeline": (("parallel.pipeline=2", "parallel.layers=2,1"), ()),
    }
    made: dict[Any, Any] = {}

    def create_groups(topology: Any, *arguments: Any) -> Any:
        key = topology.sizes
        if key not in made:
            made[key] = comm.create_groups(topology, *arguments)
        return made[key]

    found = []
    with found_once(), mock.patch.object(networks, "create_groups", create_groups):
        for folder in folders:
            source = find_source(Path(folder))
            for sets, plugins in splits.values():
                run = networks.plan(source, Request(sets=sets, plugins=plugins, nproc=world))
                found.append(LoadedModel(run, source, World(rank, world))(batch()["tokens"]).clone())
    return found


@pytest.mark.multiproc
@pytest.mark.parametrize(
    "cases", [SPLIT, pytest.param(tuple(set(CASES) - set(SPLIT)), marks=pytest.mark.nightly)], ids=["each", "others"]
)
def test_ranks_that_share_a_model_compute_the_logits_of_transformers(
    cases: Sequence[str], travelled: Callable[[str], Travelled]
) -> None:
    models = [travelled(case) for case in cases]
    expected = [model.logits for model in models for _ in range(2)]
    for found in run_ranks(logits_on_ranks, 2, [str(model.folder / "hf") for model in models]):
        for index, (mine, logits) in enumerate(zip(found, expected, strict=True)):
            torch.testing.assert_close(mine, logits, rtol=1e-5, atol=1e-5, msg=cases[index // 2])


@pytest.mark.parametrize(
    ("family", "said"),
    [*((family, {}) for family in FAMILIES), *((case.family, {**SMALL, **case.config}) for case in CASES.values())],
    ids=[*(f"{family}, all by default" for family in FAMILIES), *CASES],
)
def test_keys_that_a_config_leaves_out_mean_what_they_do_in_transformers(family: str, said: Mapping[str, Any]) -> None:
    """What ``transformers`` saves has all keys: the others of a ``config.json`` by hand or by older versions."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    table, whole = FAMILIES[family], CONFIG_MAPPING[family](**said).to_dict()
    said = {CONFIG_MAPPING[family].attribute_map.get(key, key): value for key, value in said.items()}
    ours, wanted = (table.options({**table.defaults, **config}) for config in (said, whole))
    ours, wanted = (gpt_options(Weights(each, {}), table.model).explicit() for each in (ours, wanted))
    assert ours == wanted
    assert {**table.defaults, **said}[table.positions] == whole[table.positions]


def test_what_came_in_sixteen_bits_goes_out_in_them_with_its_files(tmp_path: Path) -> None:
    model = theirs("mistral", tmp_path / "hf", torch.bfloat16)
    said = {"eos_token_id": [7, 9], "temperature": 0.6, "do_sample": True}
    (tmp_path / "hf" / "generation_config.json").write_text(json.dumps(said))
    convert.import_model(tmp_path / "hf", tmp_path / "ours")
    convert.export_model(tmp_path / "ours", tmp_path / "again", "huggingface")
    before, after = (load_file(tmp_path / name / model_folder.SINGLE) for name in ("hf", "again"))
    assert {tensor.dtype for tensor in after.values()} == {torch.bfloat16}
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert json.loads((tmp_path / "again" / "generation_config.json").read_text()) == said
    config = json.loads((tmp_path / "again" / "config.json").read_text())
    assert (config["dtype"], config["eos_token_id"]) == ("bfloat16", model.config.eos_token_id)


def test_weights_that_sixteen_bits_cannot_hold_stay_as_they_are(tmp_path: Path) -> None:
    theirs("mistral", tmp_path / "hf")
    path = tmp_path / "hf" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "dtype": "bfloat16"}))
    convert.import_model(tmp_path / "hf", tmp_path / "ours")
    convert.export_model(tmp_path / "ours", tmp_path / "again", "huggingface")
    before, after = (load_file(tmp_path / name / model_folder.SINGLE) for name in ("hf", "again"))
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


@pytest.mark.parametrize(("case", "changes", "reason"), BETWEEN)
def test_a_model_close_to_a_family_is_refused_with_the_option_that_differs(
    case: str, changes: Mapping[str, Any], reason: str
) -> None:
    family = FAMILIES[CASES[case].family]
    config = {**family.defaults, **SMALL, **CASES[case].config}
    near = family.options({**config, "hidden_act": config.get("hidden_act", "silu")})
    assert family.mismatches(gpt_options(Weights(near, {}), family.model)) == []
    reasons = family.mismatches(gpt_options(Weights(nested({**near, **changes}), {}), family.model))
    assert any(reason.removeprefix(f"{family.model_type}: ") in each for each in reasons)


def test_texts_of_phi_3_are_read_by_the_factors_of_their_length(travelled: Callable[[str], Travelled]) -> None:
    """Short ones up to 8 tokens, long ones beyond: in a pass, among windows of all lengths, and while a text grows."""
    from transformers import AutoModelForCausalLM

    folder = travelled("phi3, long").folder
    # Not the model that other tests ran: its frequencies depend on what it has read before.
    theirs = AutoModelForCausalLM.from_pretrained(folder / "hf").eval()
    ours, tokens = load(folder / "hf", device="cpu"), batch()["tokens"]
    for size in (1, 7, 8, 9, LENGTH):
        with torch.no_grad():
            expected = theirs(tokens[:, :size]).logits
        torch.testing.assert_close(ours(tokens[:, :size]), expected, rtol=1e-5, atol=1e-5)

    texts = [tokens[number % 2, :size].tolist() for number, size in enumerate((4, 16, 8, 9, 10, 5))]
    for text, found in zip(texts, score(ours.network, [Window.of(text, 1) for text in texts], batch=4), strict=True):
        with torch.no_grad():
            logprobs = theirs(torch.tensor([text[:-1]])).logits[0].log_softmax(-1)
        assert found.logprob == pytest.approx(
            logprobs.gather(1, torch.tensor(text[1:])[:, None]).sum().item(), abs=1e-4
        )

    prompts = [tokens[0, :size].tolist() for size in (3, 6, 11)]
    grown = [list(prompt) for prompt in prompts]
    for text in grown:
        for _ in range(5):
            with torch.no_grad():
                text.append(int(theirs(torch.tensor([text])).logits[0, -1].argmax()))
    for kept in (True, False):
        written = ours.generate(prompts, temperature=0, max_new_tokens=5, cache=kept, past_end=True)
        assert [list(each.prompt_tokens + each.tokens) for each in written] == grown


@pytest.mark.parametrize("name", ["su", "yarn", "longrope"])
def test_older_names_of_phi_3_mean_a_list_of_factors(name: str) -> None:
    scaling = {"type": name, "short_factor": [1.0, 2.0], "long_factor": [3.0, 4.0]}
    family = FAMILIES["phi3"]
    lengths = {"original_max_position_embeddings": 8, "max_position_embeddings": 32}
    config = {**family.defaults, **SMALL, **lengths, "rope_scaling": scaling}
    found = flat(family.options(config))
    assert (found["rope.scaling"], found["rope.factor"]) == ("longrope", 4.0)
    assert found["rope.long_factors"] == (3.0, 4.0)
    assert family.unsupported(config) == []


#: A change of a ``config.json`` that no option of ours says.
FOREIGN = (
    ("qwen3", {"attention_bias": True}, "attention_bias=True (only False)"),
    ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
    ("gemma2", {"layer_types": ["chunked_attention"] * 3}, "'chunked_attention'"),
    ("phi3", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type='linear' (only 'default' or 'longrope')"),
    ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type='dynamic' (angles that change with"),
    ("llama, yarn", {"rope_parameters": {**YARN, "truncate": False}}, "truncate=False"),
    ("llama, yarn", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 (only 1 with rope_type='yarn')"),
    ("gpt_neox", {"attention_bias": False}, "attention_bias=False"),
    ("starcoder2", {"hidden_act": "relu"}, "hidden_act='relu'"),
    ("olmo2", {"attention_bias": True}, "attention_bias=True"),
    ("smollm3", {"no_rope_layers": [1, 0]}, "no_rope_layers lists fewer layers than num_hidden_layers=3"),
    (
        "smollm3",
        {"layer_types": ["sliding_attention"] * 3, "use_sliding_window": False},
        "layer_types has 'sliding_attention' (only with use_sliding_window=True)",
    ),
    ("granite", {"mlp_bias": False}, "mlp_bias=False (only as attention_bias=True)"),
    ("stablelm", {"qk_layernorm": True}, "qk_layernorm=True (only False)"),
    ("mistral", {"layer_types": ["sliding_attention"] * 3}, "layer_types"),
    ("deepseek v3", {"rope_interleave": False}, "rope_interleave=False (only True)"),
    ("deepseek v3", {"num_key_value_heads": 2}, "num_key_value_heads=2 (only as num_attention_heads=6)"),
    ("deepseek v3", {"rms_norm_eps": 1e-5}, "rms_norm_eps=1e-05 (only 1e-06, which the norms of latents have)"),
    ("deepseek v2", {"norm_topk_prob": True}, "norm_topk_prob=True (only False)"),
)


@pytest.mark.parametrize(("case", "changes", "reason"), FOREIGN)
def test_a_config_close_to_a_family_is_refused_with_the_key_that_differs(
    case: str, changes: Mapping[str, Any], reason: str, tmp_path: Path
) -> None:
    family = FAMILIES[CASES[case].family]
    config = {"model_type": family.model_type, **SMALL, **CASES[case].config, **changes}
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config))
    with pytest.raises(RunError) as refused:
        convert.import_model(tmp_path / "hf", tmp_path / "ours", "huggingface")
    assert reason in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("model_type", [*FAMILIES, "bert"])
def test_more_layers_than_can_be_planned_are_refused_before_each_is_listed(model_type: str, tmp_path: Path) -> None:
    (tmp_path / "hf").mkdir()
    config = {"model_type": model_type, "num_hidden_layers": MAX_LAYERS + 1}
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config))
    with pytest.raises(RunError, match="num_hidden_layers=100001 is more than the 100000 layers that can be planned"):
        convert.import_model(tmp_path / "hf", tmp_path / "ours", "huggingface")
