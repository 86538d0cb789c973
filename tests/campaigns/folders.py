"""Random tokenizers' folders against transformers: ids, prompts, special tokens, templates, texts and stops.

Every folder is read by the package that decides, from what it keeps of it, and once more without transformers, where it
must give the same or refuse. What it keeps must mean the same to transformers too, since exports are made of it.
"""

from __future__ import annotations

import random
import shutil
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from megatron_run.errors import DataError
from megatron_run_engine.data.standalone_tokenizer import standalone_files
from megatron_run_engine.data.tokenizer import open_tokenizer
from megatron_run_engine.data.tokenizer_base import Tokenizer
from megatron_run_engine.data.tokenizer_folder.exactly import NotExact, read_exactly
from megatron_run_engine.formats.end_tokens import end_tokens
from tests.campaigns.figures import Figures, campaign
from tests.campaigns.random_tokenizers import KINDS, TEXTS, Made, make, sentencepiece

_TOOLS = [{"type": "function", "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}}}]
_CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "be <b>kind</b>"},
    {"role": "user", "content": "what's the time?", "name": None},
    {"role": "assistant", "content": "it is noon  ", "reasoning_content": "look at the sun"},
]


def folders(place: Path, count: int, seed: int) -> list[Figures]:
    """``count`` folders; a row for each kind of tokenizer."""
    place.mkdir(parents=True, exist_ok=True)
    warnings.simplefilter("ignore")
    rows = []
    kinds = (*KINDS, "SentencePiece")
    each = max(1, round(count / len(kinds)))
    for number, kind in enumerate(kinds):
        maker = sentencepiece if kind == "SentencePiece" else make
        trials = _Trials(place / str(number), maker)
        seeds = [number + len(KINDS) * at for at in range(seed, seed + each)]
        row = campaign(f"folders of tokenizers, {kind}", trials.attempt, seeds)
        row.notes += [f"{trials.exact} read without transformers", f"{trials.refused} refused by both"]
        rows.append(row)
    return rows


class _Trials:
    """Folders that ``maker`` makes below ``place``; counts those read ``exact``-ly without transformers, or refused."""

    def __init__(self, place: Path, maker: Callable[[int, Path], Made]) -> None:
        self._place, self._maker = place, maker
        self.exact = self.refused = 0

    def attempt(self, seed: int) -> list[str]:
        """What is wrong with the folder of ``seed``."""
        from transformers import AutoTokenizer

        made = self._maker(seed, self._place / str(seed))
        try:
            theirs: Any = AutoTokenizer.from_pretrained(
                str(made.folder), local_files_only=True, trust_remote_code=False
            )
        except Exception:
            theirs = None
        try:
            ours = open_tokenizer(str(made.folder))
        except DataError as error:
            self.refused += theirs is None
            faults = [] if theirs is None else [f"refused: {error}"]
        else:
            faults = ["taken, where transformers refuses"] if theirs is None else [*differences(ours, theirs, seed)]
            faults += [] if theirs is None else _kept(made.folder, self._place / f"{seed}-kept", theirs, seed)
            faults += _stops(made.folder)
            self.exact += _is_exact(made.folder)
        shutil.rmtree(made.folder)
        return [f"seed {seed} ({made.kind}, {', '.join(made.words)}): {fault}" for fault in faults]


def differences(ours: Tokenizer, theirs: Any, seed: int, texts: Sequence[str] = TEXTS) -> Iterator[str]:
    """Where ``ours`` is not ``theirs``, of transformers: ids, prompts, texts, special tokens and templates."""
    chosen = random.Random(seed)
    for text in texts:
        found, expected = list(ours.encode_text(text)), theirs(text, add_special_tokens=False)["input_ids"]
        if found != expected:
            yield f"ids of {text!r} are {found}, expected {expected}"
        if (given := list(ours.encode_prompt(text))) != theirs(text)["input_ids"]:
            yield f"the prompt {text!r} is {given}, expected {theirs(text)['input_ids']}"
        ids = [*expected, *chosen.choices(range(len(theirs)), k=3)]
        if (text_of := ours.decode(ids)) != (wanted := theirs.decode(ids, skip_special_tokens=True)):
            yield f"the text of {ids} is {text_of!r}, expected {wanted!r}"
    if dict(ours.special) != dict(theirs.special_tokens_map):
        yield f"special tokens are {dict(ours.special)}, expected {theirs.special_tokens_map}"
    if theirs.eos_token_id is not None and ours.end_of_document != theirs.eos_token_id:
        yield f"a document ends with {ours.end_of_document}, expected {theirs.eos_token_id}"
    yield from _templates(ours, theirs)


def _templates(ours: Tokenizer, theirs: Any) -> Iterator[str]:
    from megatron_run_engine.data.chat_template.renderer import BEGIN, END, Refused, compiled, rendered
    from megatron_run_engine.data.chat_template.template import given_to_template

    for tools in (None, _TOOLS):
        source = ours.template(tools=tools is not None)
        if (source is None) != (theirs.chat_template is None):
            yield f"the template is {source!r}, expected {theirs.chat_template!r}"
        if source is None or theirs.chat_template is None:
            continue
        for prompt in (False, True):
            variables = given_to_template(_CHAT, tools, ours.special, prompt=prompt)
            try:
                wanted = theirs.apply_chat_template(_CHAT, tools=tools, tokenize=False, add_generation_prompt=prompt)
            except TemplateError as refused:  # what the template itself says, as that it knows no system role
                wanted = refused
            try:
                found = rendered(compiled(source), variables).replace(BEGIN, "").replace(END, "")
            except Refused as refusal:
                if not isinstance(wanted, TemplateError) or str(refusal) != str(wanted):
                    yield f"a conversation is refused: {refusal}; expected {wanted!r}"
                continue
            if found != wanted:
                yield f"a conversation is {found!r}, expected {wanted!r}"
            if list(ours.encode_text(found)) != theirs(wanted, add_special_tokens=False)["input_ids"]:
                yield "a conversation has other ids"


def _kept(folder: Path, kept: Path, theirs: Any, seed: int) -> Iterator[str]:
    """What a run keeps of ``folder`` means the same, to us and to transformers."""
    from transformers import AutoTokenizer

    kept.mkdir()
    for name, content in standalone_files(folder).items():
        (kept / name).write_bytes(content)
    try:
        read_exactly(kept)
        yield from (f"kept: {fault}" for fault in differences(open_tokenizer(str(kept)), theirs, seed))
        again: Any = AutoTokenizer.from_pretrained(str(kept), local_files_only=True, trust_remote_code=False)
        yield from (
            f"kept, in transformers: {fault}" for fault in differences(open_tokenizer(str(folder)), again, seed)
        )
    except NotExact as error:
        yield f"what is kept needs transformers: {error}"
    shutil.rmtree(kept)


def _is_exact(folder: Path) -> bool:
    """Whether ``folder`` is read without transformers; then it was read so above."""
    try:
        read_exactly(folder)
    except NotExact:
        return False
    return True


def _stops(folder: Path) -> Iterator[str]:
    from transformers import GenerationConfig

    if not (folder / "generation_config.json").is_file():
        return
    said = GenerationConfig.from_pretrained(str(folder)).eos_token_id
    expected = None if said is None else tuple(said) if isinstance(said, list) else (said,)
    if end_tokens(folder) != expected:
        yield f"texts end at {end_tokens(folder)}, expected {expected}"
