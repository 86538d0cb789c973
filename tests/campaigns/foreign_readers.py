"""What reads the files of other programs, and data."""

from __future__ import annotations

import gzip
import io
import shutil
import zipfile
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from megatron_run.errors import CheckpointError, DataError
from megatron_run_engine.data.indexed_files import IndexedReader
from megatron_run_engine.data.tokenizer import open_tokenizer
from megatron_run_engine.evaluation.tasks import _passages
from megatron_run_engine.formats.gpt_tensors import gpt_options
from megatron_run_format_distributed import Distributed
from megatron_run_format_huggingface import HuggingFace, model_folder
from megatron_run_format_huggingface.families import FAMILIES
from megatron_run_format_megatron import MegatronLM
from megatron_run_inference.commands.generate import _read_prompts
from tests.campaigns.fuzzed import DATA, MODEL, TOKENS, reads
from tests.campaigns.readers import header_of, run_command, with_header
from tests.campaigns.samples import compressed

# Models and scripts of other programs.


def _imported(path: Path, up: int = 0) -> object:
    """What an import reads before it writes, and the first values."""
    formats = (HuggingFace(), MegatronLM(), Distributed())
    found = next((each for each in formats if each.recognises(path.parents[up])), None)
    if found is None:
        raise DataError("no format is recognised")  # as the command says
    weights = found.read(path.parents[up])
    gpt_options(weights)
    return [read().sum() for read in list(weights.tensors.values())[:3]]


def _described(path: Path) -> None:
    """Read what comes before the weights, of which there are none."""
    with suppress(CheckpointError):
        HuggingFace().read(path.parent)


def _exported(path: Path) -> None:
    target = path.parent / "again"
    target.mkdir()
    try:
        model_folder.write(model_folder.read(path.parent), target)
    finally:
        shutil.rmtree(target)


def _script(path: Path) -> object:
    return MegatronLM().translate_script(path)


def _pickled(content: bytes) -> bytes:
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        return archive.read(next(name for name in archive.namelist() if name.endswith("data.pkl")))


def _rezipped(whole: bytes, pickled: bytes) -> bytes:
    """The archive with another ``data.pkl``."""
    made = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(whole)) as old, zipfile.ZipFile(made, "w") as new:
        for name in old.namelist():
            new.writestr(name, pickled if name.endswith("data.pkl") else old.read(name))
    return made.getvalue()


for _family in ("gpt2", "llama", "mixtral"):
    reads(f"config.json of {_family}", MODEL, f"{_family}/config.json", _imported, "json", share=0.3)
for _family in FAMILIES:
    reads(f"sizes of {_family}", MODEL, f"families/{_family}/config.json", _described, "json", share=0.05)
reads(
    "weights of Hugging Face's", MODEL, "llama/model.safetensors", _imported, "json", header_of, with_header, share=0.3
)
reads("an index of weights", MODEL, "parts/model.safetensors.index.json", _imported, "json", share=0.2)
reads("generation_config.json", MODEL, "gpt2/generation_config.json", _exported, "json", share=0.05)
_MP, _DIST = "megatron/iter_0000003/mp_rank_00/model_optim_rng.pt", "distributed"
reads("Megatron's file of a rank", MODEL, _MP, partial(_imported, up=2), share=0.3)
reads("Megatron's pickle of a rank", MODEL, _MP, partial(_imported, up=2), inner=_pickled, pack=_rezipped, share=0.5)
reads("Megatron's newest step", MODEL, "megatron/latest_checkpointed_iteration.txt", _imported, share=0.1)
reads("Megatron's .metadata", MODEL, f"{_DIST}/.metadata", _imported, share=1)
reads("Megatron's metadata.json", MODEL, f"{_DIST}/metadata.json", _imported, "json", share=0.2)
reads("Megatron's common.pt", MODEL, f"{_DIST}/common.pt", _imported, inner=_pickled, pack=_rezipped, share=0.3)
reads("Megatron's chunks", MODEL, f"{_DIST}/__0_0.distcp", _imported, share=0.3)
reads("the description of an export", MODEL, "export/megatron-run.json", _imported, "json", share=0.3)
for _name in ("gpt_345m", "llama_70b", "mixtral", "slurm"):
    reads(f"the launch script {_name}", MODEL, f"scripts/{_name}.sh", _script, share=0.1)


# Tokenizers and templates.


def _tokenized(path: Path) -> object:
    tokenizer = open_tokenizer(str(path))
    tokens = tokenizer.encode(b"the cat sat, on 12 mats.\n\xc3\xa9", path)
    tokenizer.encode_places("the cat")
    return tokenizer.identity, tokenizer.vocab_size, tokenizer.decode([int(token) for token in tokens])


def _rendered(path: Path) -> object:
    from megatron_run_engine.data.chat_template.chat_messages import NoConversation
    from megatron_run_engine.data.chat_template.template import Templates
    from megatron_run_engine.data.tokenizer import open_tokenizer

    template = Templates("auto", open_tokenizer(str(path.with_name("tokenizer.json"))), path).of(tools=False)
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    with suppress(NoConversation):  # one line for each of its lines, or all of them refused
        template.render(messages)
    return template


reads("tokenizer.json", TOKENS, "tokenizer/tokenizer.json", _tokenized, "json", share=3)
reads("vocab.json", TOKENS, "bpe/vocab.json", _tokenized, "json", share=1)
reads("merges.txt", TOKENS, "bpe/merges.txt", _tokenized, share=1)
reads("vocab.txt", TOKENS, "wordpiece/vocab.txt", _tokenized, share=1)
reads("tokenizer_config.json of BERT", TOKENS, "wordpiece/tokenizer_config.json",
       lambda path: _tokenized(path.with_name("vocab.txt")), "json", share=1)  # fmt: skip
reads("a model of SentencePiece", TOKENS, "sentencepiece/tokenizer.model", _tokenized, share=1)
reads("tokenizer_config.json", TOKENS, "tokenizer/tokenizer_config.json", _rendered, "json", share=1)
reads("a chat template", TOKENS, "chat/chat_template.jinja", _rendered, share=2)

# Data.


def _indexed(path: Path) -> object:
    from megatron_run_data_indexed.preparation.inspect import summarise
    from megatron_run_engine.data.token_ids import check_ids

    prefix = path.with_suffix("")
    reader = IndexedReader(prefix)
    sums = [reader[number].sum() for number in range(len(reader))]
    return summarise(reader, prefix), check_ids(reader, None), sums


def _about(path: Path) -> object:
    return run_command("data", "inspect", path.with_suffix(""), "--samples", "1")


def _records(path: Path) -> object:
    from megatron_run_data_indexed.preparation.inputs import blocks, find_inputs
    from megatron_run_data_indexed.preparation.records import Reading, read_records, texts

    found, _ = find_inputs([str(path)])
    reading = Reading(malformed="keep")
    return list(texts(found, reading)), [
        list(read_records(block, reading)) for block in blocks(found, None, 64)
    ]  # blocks of a few lines


def _converted(path: Path) -> object:
    from megatron_run_data_indexed.preparation.import_export import import_

    return import_(path, path.with_name("converted"), "tokens", overwrite=True)


def _conversations(path: Path) -> object:
    from megatron_run_data_instruct.conversations import conversation, lines_of
    from megatron_run_engine.data.chat_template.chat_messages import NoConversation
    from megatron_run_engine.data.chat_template.template import Templates
    from megatron_run_engine.data.documents import Document
    from megatron_run_engine.data.tokenizer import ByteTokenizer

    template, told = Templates("auto", ByteTokenizer(), path).of(tools=False), []
    for line in lines_of([Document(path)]):
        with suppress(NoConversation):
            told.append(template.render(*conversation(line.content)))
    return told


def _choices(task: Any, path: Path) -> object:
    from megatron_run_data_nlu.questions import read_choices

    return list(read_choices(task, path))


def _questions(path: Path) -> object:
    from megatron_run_data_nlu.questions import read_questions

    return list(read_questions(path))


def _order(path: Path) -> object:
    from megatron_run_data_indexed.cache import cached, within

    fits = lambda found: within(found["order"], (np.int64, (40,)), 0, 40)  # noqa: E731  # of this table of readers
    return cached(path.parent.parent, path.parent.name, ["order"], lambda: [np.arange(40)], fits)


def _unzstd(content: bytes) -> bytes:
    import zstandard

    return zstandard.ZstdDecompressor().decompressobj().decompress(content)


reads("an .idx", DATA, "indexed/c.idx", _indexed, share=4)
reads("a .bin", DATA, "indexed/c.bin", _indexed, share=1)
reads("what a dataset was made of", DATA, "indexed/c.json", _about, "json", share=0.5)
reads("an order of samples", DATA, "cache/key/order.npy", _order, share=2)
reads("JSON lines", DATA, "texts/a.jsonl", _records, "lines", share=4)
reads("JSON lines of tokens", DATA, "texts/tokens.jsonl", _converted, "lines", share=0.2)
reads("a text", DATA, "texts/a.txt", _records, share=1)
reads("a .gz", DATA, "texts/a.jsonl.gz", _records, share=2)
reads("the lines in a .gz", DATA, "texts/a.jsonl.gz", _records, "lines", gzip.decompress,
       lambda whole, content: gzip.compress(content, 1), share=1)  # fmt: skip
reads("a .zst", DATA, "texts/a.jsonl.zst", _records, share=2)
reads("the lines in a .zst", DATA, "texts/a.jsonl.zst", _records, "lines", _unzstd,
       lambda whole, content: compressed(content), share=1)  # fmt: skip
reads("a Parquet file", DATA, "texts/a.parquet", _records, share=2)
reads("a Parquet file of tokens", DATA, "texts/tokens.parquet", _converted, share=0.2)
reads("conversations", DATA, "chat/a.jsonl", _conversations, "lines", share=1)
reads("MNLI's table", DATA, "mnli/train.tsv", partial(_choices, "mnli"), share=1)
reads("MNLI's lines", DATA, "mnli/train.jsonl", partial(_choices, "mnli"), "lines", share=1)
reads("QQP's table", DATA, "qqp/train.tsv", partial(_choices, "qqp"), share=1)
reads("RACE's passages", DATA, "race/train/high/1.txt", partial(_choices, "race"), "json", share=2)
reads("SQuAD's questions", DATA, "squad/train-v2.0.json", _questions, "json", share=2)
reads("passages of a task", DATA, "texts/cloze.jsonl", _passages, "lines", share=1)
reads("prompts", DATA, "texts/prompts.json", _read_prompts, "json", share=1)
