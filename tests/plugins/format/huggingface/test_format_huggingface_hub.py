"""Models, tokenizers and datasets of the Hub's protocol, from a server on loopback and from the library's cache."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from socket import gethostname
from unittest import mock

import pytest
import torch
from huggingface_hub.utils import get_session

from megatron_run import load
from megatron_run.config.request import Found, Request
from megatron_run.errors import ExitCode
from megatron_run.planning import load_config, resolve
from megatron_run.registry import fetching
from megatron_run_cli.main import main
from megatron_run_engine.checkpoint.step_folder import Checkpoints
from megatron_run_engine.data import open_tokenizer
from megatron_run_format_huggingface.hub import wanted
from megatron_run_format_huggingface.hub.failures import in_one_line
from megatron_run_format_huggingface.hub.names import HubName, at_home
from tests.cli.test_cli_finetune import write_words
from tests.plugins.optional_library import check_import
from tests.support.forked import forked_command
from tests.support.hub_server import Hub, serving

pytest.importorskip("huggingface_hub")

pytestmark = [
    pytest.mark.skipif(find_spec("transformers") is None, reason="needs transformers"),  # a second of imports
    pytest.mark.filterwarnings("ignore:Use 'content="),  # httpx's, about how the library sends files
]

Output = pytest.CaptureFixture[str]
#: What is read of a model, and what lies beside it in a repository and is not.
READ = ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
BESIDE = ("README.md", "modeling_tiny.py", "pytorch_model.bin", "onnx/tokenizer.model", "consolidated.safetensors")
SMALL = ("train.steps=2", "train.global_batch_size=1", "eval.batches=1", "run.threads=1", "data.split=50,25,25")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository with a random GPT-2, its tokenizer, and what else people put beside one."""
    from transformers import GPT2Config, GPT2LMHeadModel

    folder = tmp_path_factory.mktemp("made") / "tiny"
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=5, n_positions=16, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
    GPT2LMHeadModel(config).save_pretrained(folder)
    write_words(folder / "tokenizer.json")
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    (folder / "onnx").mkdir()
    for name in BESIDE:
        (folder / name).write_text("nobody reads this\n")
    return folder


@pytest.fixture
def hub(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A server with that repository, an empty cache, no token, and a folder to work in."""
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.delenv("HF_TOKEN", raising=False)
    with serving(tmp_path / "home") as hub:
        shutil.copytree(made, tmp_path / "tiny")
        hub.folders["models/org/tiny"] = tmp_path / "tiny"
        yield hub


def run(words: str) -> int:
    return main(words.split())


def last_line(output: Output) -> str:
    lines = output.readouterr().err.splitlines()
    assert [line for line in lines if not line.startswith("megatron-run: ")] == []
    return lines[-1]


def test_a_model_is_imported_from_its_name_and_only_what_is_read_is_fetched(hub: Hub, capsys: Output) -> None:
    assert run("import hf:org/tiny imported") == 0
    told = capsys.readouterr()
    assert "huggingface: 3,648 parameters" in told.out
    assert all(line.startswith("megatron-run: fetching ") for line in told.err.splitlines())
    assert sorted(hub.asked) == READ
    hub.asked.clear()
    assert run("import hf:org/tiny again") == 0  # from the cache, whose files are links
    assert hub.asked == []
    about = Checkpoints(Path("imported/checkpoints")).manifest(0).about
    assert at_home(Path(about.source)) == HubName("org/tiny", revision=hub.commit("models/org/tiny"))
    assert hub.commit("models/org/tiny") in Path("imported/config.yaml").read_text().splitlines()[0]


def test_no_connection_of_the_library_stays_open(hub: Hub) -> None:
    with in_one_line(HubName("org/tiny")):
        session = get_session()
        assert not session.is_closed
    assert session.is_closed


def test_what_is_in_the_cache_serves_without_a_network(
    hub: Hub, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    assert run("generate hf:org/tiny fox --max-new-tokens 2 --temperature 0") == 0
    online = capsys.readouterr().out
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert run("generate hf:org/tiny fox --max-new-tokens 2 --temperature 0") == 0
    assert capsys.readouterr().out == online
    assert run("generate hf:org/other fox") == ExitCode.DATA
    assert "hf:org/other is not in the cache, or not all that is read of it: HF_HUB_OFFLINE" in last_line(capsys)


def test_a_model_whose_download_broke_off_is_not_taken_from_the_cache(
    hub: Hub, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(time, "sleep", lambda _: None)  # the library's, between its attempts
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1000)  # what is kept of a file that breaks off
    hub.torn = 5000  # tokenizers are smaller, weights larger
    assert run("import hf:org/tiny imported") == ExitCode.DATA
    line = last_line(capsys)
    assert "hf:org/tiny broke off: the connection to 127.0.0.1:" in line
    assert "type it again: the files that came whole are there" in line
    assert set(hub.ranges) == {"model.safetensors from 5000"}  # the library's own attempts
    assert not Path("imported").exists()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert run("import hf:org/tiny imported") == ExitCode.DATA
    assert "hf:org/tiny is not in the cache, or not all that is read of it" in last_line(capsys)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    hub.torn = None
    hub.asked.clear()
    assert run("import hf:org/tiny imported") == 0
    assert set(hub.asked) == {"model.safetensors"}


@pytest.mark.parametrize(
    ("name", "code", "line"),
    [
        (
            "org/nothing",
            ExitCode.DATA,
            "hf:org/nothing is not on the Hub: there is none of that name, or it is private",
        ),
        ("org/tiny@v9", ExitCode.DATA, "org/tiny has no revision v9"),
        ("org/gated", ExitCode.DATA, "hf:org/gated is gated: its owner lets in who has asked, and no token says who"),
        (
            "org/private",
            ExitCode.DATA,
            "hf:org/private is not on the Hub: there is none of that name, or it is private",
        ),
        ("org/pickled", ExitCode.DATA, "org/pickled has no model.safetensors: pytorch_model.bin is a pickle"),
        ("org/empty", ExitCode.DATA, "hf:org/empty holds no model: it has no config.json"),
        ("a/b/c", ExitCode.INPUT, "hf:a/b/c is no name of the Hub; type hf:ORG/NAME[@REVISION]"),
        ("a/../b", ExitCode.INPUT, "hf:a/../b is no name of the Hub"),
    ],
)
def test_what_cannot_be_had_is_one_line(
    hub: Hub, name: str, code: int, line: str, tmp_path: Path, capsys: Output
) -> None:
    (tmp_path / "pickled").mkdir()
    for file in ("config.json", "pytorch_model.bin"):
        (tmp_path / "pickled" / file).write_text("{}")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "notes.txt").write_text("nothing\n")
    hub.folders |= {f"models/org/{each}": tmp_path / each for each in ("pickled", "empty")}
    hub.folders |= {f"models/org/{each}": hub.folders["models/org/tiny"] for each in ("gated", "private")}
    hub.gated, hub.private = {"models/org/gated"}, {"models/org/private"}
    assert run(f"import hf:{name} imported") == code
    assert line in last_line(capsys)
    assert not Path("imported").exists()
    assert hub.asked == []


def test_a_server_that_fails_and_one_that_is_not_there_are_one_line(
    hub: Hub, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    hub.status = 503
    assert run("import hf:org/tiny imported") == ExitCode.DATA
    assert "hf:org/tiny failed: 127.0.0.1:" in last_line(capsys)
    monkeypatch.setattr(constants, "ENDPOINT", "http://user:secret@127.0.0.1:9")
    assert run("import hf:org/tiny imported") == ExitCode.DATA
    line = last_line(capsys)
    assert "hf:org/tiny is not in the cache, or not all that is read of it: 127.0.0.1:9 cannot be reached; try" in line
    assert "secret" not in line


def test_a_cache_of_an_older_library_has_no_list_and_serves_as_far_as_it_goes(
    hub: Hub, capsys: Output, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As ``from_pretrained`` has left it: blobs, refs and snapshots of links."""
    import huggingface_hub
    from huggingface_hub import constants, errors

    assert run("import hf:org/tiny imported") == 0
    repository = tmp_path / "home" / "hub" / "models--org--tiny"
    for each in repository.iterdir():
        if each.name not in ("blobs", "refs", "snapshots"):
            shutil.rmtree(each)
    listing = mock.Mock(side_effect=errors.CachedRepoTreeNotFoundError)  # the library remembers what it has read
    monkeypatch.setattr(huggingface_hub, "get_cached_repo_tree", listing)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert run("import hf:org/tiny again") == 0
    (weights,) = repository.glob("snapshots/*/model.safetensors")
    assert weights.is_symlink()
    weights.unlink()
    capsys.readouterr()
    assert run("import hf:org/tiny third") == ExitCode.DATA
    line = last_line(capsys)
    assert "is not in the cache, or not all that is read of it: 127.0.0.1:" in line
    assert "hf:org/tiny has no model.safetensors" in line


def test_a_cache_that_cannot_be_written_is_one_line(hub: Hub, capsys: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    Path("file").write_text("in the place of the cache")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(Path("file/hub").absolute()))
    assert run("import hf:org/tiny imported") == ExitCode.DATA
    line = last_line(capsys)
    assert "the cache cannot keep hf:org/tiny@" in line
    assert "set HF_HOME to a folder that you can write, with room" in line


def test_without_its_library_a_name_says_what_to_install(
    hub: Hub, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("huggingface_hub", "huggingface_hub.utils"):
        monkeypatch.setitem(__import__("sys").modules, name, None)
    assert run("import hf:org/tiny imported") == ExitCode.PLUGIN
    assert "type: pip install 'huggingface-hub" in last_line(capsys)


def test_a_revision_that_is_named_is_taken(hub: Hub) -> None:
    commit = hub.commit("models/org/tiny")
    assert run(f"import hf:org/tiny@{commit} imported") == 0
    assert commit in Checkpoints(Path("imported/checkpoints")).manifest(0).about.source


def test_python_loads_a_name(hub: Hub) -> None:
    logits = load("hf:org/tiny")([[0, 1]])
    assert torch.equal(logits, load(hub.folders["models/org/tiny"])([[0, 1]]))


def test_weights_in_several_files_are_those_of_the_index(hub: Hub) -> None:
    from transformers import AutoModelForCausalLM

    folder = hub.folders["models/org/tiny"]
    model = AutoModelForCausalLM.from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="6KB")
    (folder / "model-of-somebody.safetensors").write_text("not of the index")
    parts = {*json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"].values()}
    assert run("import hf:org/tiny imported") == 0
    assert {name for name in hub.asked if name.endswith(".safetensors")} == parts
    assert len(parts) > 1


@pytest.mark.multiproc
def test_a_name_is_fine_tuned_and_pushed_with_a_card(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("text.txt").write_text("the fox the dog fox\n" * 200)
    words = ["finetune", "hf:org/tiny", "--data", "text.txt", *(w for k in SMALL for w in ("--set", k))]
    done = forked_command((*words, "--set", "run.folder=tuned"), Path.cwd())
    assert done.returncode == 0, done.stderr
    (imported,) = Path("runs/imported").iterdir()
    assert imported.name.startswith("tiny-")
    assert hub.commit("models/org/tiny") in Checkpoints(imported / "checkpoints").manifest(0).about.source
    monkeypatch.setenv("HF_TOKEN", hub.token)
    assert run("export tuned out --to huggingface --push org/mine") == 0
    assert hub.created["org/mine"]["visibility"] == "private"
    pushed = hub.pushed["org/mine"]
    assert sorted(pushed) == sorted([*READ, "README.md"])
    assert all(pushed[name] == Path("out", name).read_bytes() for name in pushed)
    front, _, card = pushed["README.md"].decode().removeprefix("---\n").partition("\n---\n")
    assert front == "library_name: transformers\ntags:\n- megatron-run\nbase_model: org/tiny"
    assert f"weights of org/tiny at commit {hub.commit('models/org/tiny')}" in card
    about = Checkpoints(Path("tuned/checkpoints")).manifest(2).about
    for row in ("| step | 2 of 2 |", "| data | text: text.txt |", f"| training loss | {about.losses[-1]:.4f} |"):
        assert row in card
    evaluated = [json.loads(line) for line in Path("tuned/eval.jsonl").read_text().splitlines()]
    assert f"| validation loss | {evaluated[-1]['loss']:.4f} |" in card
    assert f"torch {torch.__version__}" in card
    for secret in (hub.token, str(tmp_path), gethostname(), "hf_"):
        assert secret not in pushed["README.md"].decode()


def test_what_is_pushed_replaces_older_weights(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", hub.token)
    hub.created["org/mine"] = {}
    hub.pushed["org/mine"] = {"model-00001-of-00002.safetensors": b"old", "LICENSE": b"theirs"}
    assert run("import hf:org/tiny imported") == 0
    assert run("export imported out --to huggingface --push org/mine") == 0
    assert hub.pushed["org/mine"].keys() == {*READ, "README.md", "LICENSE"}


def test_who_may_not_push_is_told_before_anything_is_written(
    hub: Hub, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run("import hf:org/tiny imported") == 0
    for words, line in {
        "--to huggingface --push org/mine": "hf:org/mine cannot be pushed: no token says who you are; type hf auth",
        "--to huggingface --push a/b/c": "hf:a/b/c is no name of the Hub",
        "--to distributed --push org/mine": "format=distributed publishes nothing (from --push); leave out --push",
    }.items():
        assert run(f"export imported out {words}") == ExitCode.INPUT
        assert line in last_line(capsys)
        assert not Path("out").exists()
    monkeypatch.setenv("HF_TOKEN", "hf_another")
    assert run("export imported out --to huggingface --push org/mine") == ExitCode.DATA
    line = last_line(capsys)
    assert "hf:org/mine" in line
    assert "out is whole, and is sent by: hf upload org/mine out" in line
    assert "hf_another" not in line
    assert not hub.pushed


def test_a_run_takes_the_tokenizer_of_a_name_and_a_start_again_the_same_revision(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:

    Path("text.txt").write_text("the fox the dog\n" * 500)
    first, sets = hub.commit("models/org/tiny"), {"data.tokenizer": "hf:org/tiny", "data.paths": "text.txt"}
    begun = load_config("preset:tiny", plugins=["data=text"], sets=sets)
    place = begun.config.data.options["tokenizer"]
    assert at_home(Path(place)) == HubName("org/tiny", revision=first)
    assert f"data.tokenizer is hf:org/tiny@{first}" in begun.notices
    assert "model.safetensors" not in hub.asked
    assert open_tokenizer(place).encode(b"fox dog", "a text").tolist() == [1, 2]
    assert main(["preset:tiny", "--plugin=data=text,paths=text.txt,tokenizer=hf:org/tiny", "--dry-run"]) == 0

    run_folder = Path("begun")
    run_folder.mkdir()
    (run_folder / "run.json").write_text(json.dumps({"identity": {"data.tokenizer": place}}))
    (hub.folders["models/org/tiny"] / "README.md").write_text("another commit\n")
    again = load_config("preset:tiny", plugins=["data=text"], sets={**sets, "run.folder": str(run_folder)})
    assert again.config.data.options["tokenizer"] == place
    other = load_config("preset:tiny", plugins=["data=text"], sets=sets)
    assert hub.commit("models/org/tiny") in other.config.data.options["tokenizer"]
    assert hub.commit("models/org/tiny") != first


def test_a_name_that_was_found_in_somebody_elses_folder_fetches_nothing(hub: Hub) -> None:
    found = Found({"data": {"use": "text", "tokenizer": "hf:org/tiny"}}, "somebody's folder")
    run = resolve(Request(("preset:tiny", found)))
    assert run.config.data.options["tokenizer"] == "hf:org/tiny"
    assert hub.asked == []


def test_a_dataset_is_prepared_from_its_name(hub: Hub, tmp_path: Path, capsys: Output) -> None:
    folder = tmp_path / "texts"
    (folder / "en").mkdir(parents=True)
    (folder / "en" / "train-0.jsonl").write_text('{"text": "the fox"}\n' * 3)
    (folder / "en" / "test-0.jsonl").write_text('{"text": "the dog"}\n')
    (folder / "README.md").write_text("about it\n")
    (folder / "script.py").write_text("raise SystemExit\n")
    hub.folders["datasets/org/texts"] = folder
    assert run("data prepare hf:org/texts --tokenizer hf:org/tiny --out ours --workers 1") == 0
    told = capsys.readouterr()
    assert "9 tokens in 3 documents of 1 files" in told.out
    assert "what has train in its name is read; 1 file left out: en/test-0.jsonl" in told.err
    assert "en/train-0.jsonl" in hub.asked
    assert not {"README.md", "script.py", "en/test-0.jsonl"} & {*hub.asked}
    about = json.loads(Path("ours.json").read_text())
    assert hub.commit("models/org/tiny") in about["tokenizer"]
    assert hub.commit("datasets/org/texts") in json.dumps(about)

    assert run("data prepare hf:org/texts/en/test-* --tokenizer bytes --out test --workers 1") == 0
    assert "in 1 documents" in capsys.readouterr().out
    (folder / "de").mkdir()
    (folder / "de" / "train-0.jsonl").write_text('{"text": "der Fuchs"}\n')
    assert run("data prepare hf:org/texts --tokenizer bytes --out both --workers 1") == ExitCode.DATA
    assert "hf:org/texts has texts in 2 folders: de, en" in last_line(capsys)
    assert run("data prepare hf:org/texts/fr --tokenizer bytes --out both --workers 1") == ExitCode.DATA
    assert "matches no file that is read; there are de/train-0.jsonl" in last_line(capsys)


def test_a_file_outside_of_its_repository_is_not_asked_for() -> None:
    assert wanted.own(["a/../../b", "../b", "/b", "", "./b", "a/b", "b"]) == ["a/b", "b"]


def test_who_uses_no_name_imports_no_library_of_the_hub(tmp_path: Path) -> None:
    check_import("megatron_run_format_huggingface", "huggingface_hub", tmp_path)


def test_a_word_without_a_known_scheme_is_a_path() -> None:
    assert fetching.local_folder(Path("runs/latest")) == Path("runs/latest")
    assert fetching.local_folder(Path("nobody:org/tiny")) == Path("nobody:org/tiny")
