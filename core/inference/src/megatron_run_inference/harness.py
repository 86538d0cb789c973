"""lm-evaluation-harness (https://github.com/EleutherAI/lm-evaluation-harness) on a model of ours, on any topology.

Every rank runs the harness on the same requests, which are scored and generated together.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lm_eval import simple_evaluate
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs, postprocess_generated_text
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows

from megatron_run.errors import DataError, InputError
from megatron_run.errors.wording import did_you_mean, near_path
from megatron_run_engine.data.chat_template.chat_messages import NoConversation
from megatron_run_engine.data.chat_template.of_source import no_template, special_texts
from megatron_run_engine.data.chat_template.template import ChatTemplate
from megatron_run_engine.runtime.generation import Generation, Sampling, Score, TextTokens, Window, score
from megatron_run_inference.text_stream import TextStream

if TYPE_CHECKING:
    from megatron_run_inference.loaded_model import LoadedModel

#: Tokens that a task gets which does not say how many it wants, as for the harness's own models.
_TOKENS = 256
#: Settings of a task that change no text.
_NO_EFFECT = (("num_beams", 1), ("use_cache", True))


class HarnessModel(TemplateLM):  # type: ignore[misc]  # the harness has no annotations
    """The requests of the harness, answered by ``model``; ``batch`` of them in a pass."""

    def __init__(self, model: LoadedModel, batch: int = 8) -> None:
        super().__init__()
        self._model, self._batch = model, batch
        data = model.data
        if data is None or data.end_of_text is None:
            raise DataError(
                f"{model.source.path} has no token that ends a text", why="the harness begins texts with it"
            )
        self._end = data.end_of_text
        named = data.special_tokens
        begin, end = named.get("bos"), named.get("eos")
        self._begins_with, self._prefix = begin or end or ("", self._end)
        self._begin = begin[0] if begin else ""
        self._stops = (end[0],) if end else ()

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        return self._end

    @property
    def prefix_token_id(self) -> int:
        """The token with which an empty text begins: the tokenizer's first, else the one that ends a text."""
        return self._prefix

    @property
    def tokenizer_name(self) -> str:
        """The name of the chat template's owner in the harness's caches."""
        return str(self._model.source.path).replace("/", "__")

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """The model's own template where one is asked for, as the harness's results show it."""
        return self._chat.source if chat_template else None

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The text of ``chat_history``, and of the beginning of an answer, or else up to its last message's end.

        Messages of the system are left out where the template refuses them. Raises :class:`InputError` for others.
        """
        try:
            return self._chat.text(chat_history, prompt=add_generation_prompt)
        except NoConversation:
            kept = [message for message in chat_history if message["role"] != "system"]
        try:
            return self._chat.text(kept, prompt=add_generation_prompt)
        except NoConversation as cause:
            raise InputError("a question cannot be asked through the chat template", why=str(cause)) from cause

    @cached_property
    def _chat(self) -> _Chat:
        data = self._model.data
        source = None if data is None else data.chat_template()
        if data is None or source is None:
            raise no_template(self._model.source.path, "let it continue plain text, without --chat")
        return _Chat(source, ChatTemplate(source, self._model.source.path, special_texts(data)))

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """The tokens of ``string`` as the harness's ``hf`` has them: with those that the tokenizer puts around a text.

        They are left out where ``string`` begins with the first token's own text.
        """
        if add_special_tokens is None:
            add_special_tokens = not (self._begins_with and string.startswith(self._begins_with))
        return self._model.encode_prompt(string) if add_special_tokens else self._model.encode(string)

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[tuple[str, str], list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        longest = self._model.positions
        for texts, context, continuation in requests:
            if not context or not 1 <= len(continuation) <= longest:
                raise DataError(
                    f"the harness cannot score {_short(texts[1])} after {_short(texts[0])}",
                    why=f"they are {len(continuation)} tokens after {len(context)}, and the model reads {longest}: "
                    "both must have some, and the first must fit",
                    fix="change the task's texts; a context of spaces alone has no token of its own",
                )
        windows = [
            Window.ending([*context, *continuation], len(continuation), longest)
            for _, context, continuation in requests
        ]
        return [(each.logprob, each.greedy) for each in self._score(windows)]

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """The log-probability of each whole text, in windows that do not overlap."""
        windows, owners = [], []
        for number, request in enumerate(requests):
            tokens = self.tok_encode(request.args[0])
            for inputs, targets in get_rolling_token_windows(tokens, self._prefix, self._model.positions, 1):
                windows.append(Window.of([*inputs, targets[-1]], len(inputs) + 1 - len(targets)))
                owners.append(number)
        sums = [0.0] * len(requests)
        for owner, each in zip(owners, self._score(windows), strict=True):
            sums[owner] += each.logprob
        return sums

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Continue each context until one of its strings; requests of equal settings share passes."""
        texts = [""] * len(requests)
        groups: dict[TextSettings, list[int]] = {}
        for number, request in enumerate(requests):
            groups.setdefault(TextSettings.of(request.args[1], self._model.source.sampling), []).append(number)
        for settings, numbers in groups.items():
            if settings.tokens >= self._model.positions:
                why = f"the model reads {self._model.positions} tokens"
                fix = "ask for fewer by the task's generation_kwargs: max_gen_toks"
                raise InputError(f"a task asks for texts of {settings.tokens} tokens", why=why, fix=fix)
            for start in range(0, len(numbers), self._batch):
                part = numbers[start : start + self._batch]
                found = self._continued([requests[number].args[0] for number in part], settings)
                for number, text in zip(part, found, strict=True):
                    texts[number] = text
        return texts

    def _continued(self, contexts: Sequence[str], settings: TextSettings) -> list[str]:
        """The text that the model writes after each of ``contexts``, decoded by itself, as by the harness's ``hf``.

        SentencePiece leaves out the space before the first word of a text, and so of what was written.
        """
        ends, stops = self._model.ends | {self._end}, (*settings.stop, *self._stops)
        silent = self._model.silent_stops(stops)
        rows = [TextTokens(self._prompt(context, settings.tokens)) for context in contexts]
        streams = {id(row): TextStream(self._model.decode, (), stops, silent) for row in rows}
        limits = {id(row): len(row.tokens) + settings.tokens for row in rows}
        for row in Generation(self._model.network, rows, settings.sampling).steps():
            stream, token = streams[id(row)], row.tokens[-1]
            stream.push(token)
            row.ended = token in ends or stream.stopped or len(row.tokens) == limits[id(row)]
        written = [row.tokens[limits[id(row)] - settings.tokens :] for row in rows]
        return [postprocess_generated_text(self._model.decode(each) or "", list(stops), None) for each in written]

    def _prompt(self, context: str, tokens: int) -> list[int]:
        """The end of ``context`` that leaves room for ``tokens`` more."""
        bare = bool(self._begin) and context.startswith(self._begin)
        found = self.tok_encode(context, add_special_tokens=not bare) or [self._prefix]
        return found[-(self._model.positions - tokens) :]

    def _score(self, windows: Sequence[Window]) -> list[Score]:
        return score(self._model.network, windows, self._batch)


@dataclass(frozen=True)
class _Chat:
    """A model's own chat template and its ``source``."""

    source: str
    template: ChatTemplate

    def text(self, messages: Sequence[Mapping[str, str]], *, prompt: bool) -> str:
        """The text of ``messages``, and of the beginning of an answer, or else up to the last one's end."""
        if prompt:
            return self.template.prompt(messages)
        text, _ = self.template.render(messages)
        last = messages[-1]["content"]
        start = text.rindex(last.strip())
        end = next(end for end in (last.lstrip(), last.strip()) if text.startswith(end, start))
        return text[: start + len(end)]


@dataclass(frozen=True)
class TextSettings:
    """How a request's text is written: until a string of ``stop``, or ``tokens`` are there."""

    stop: tuple[str, ...]
    tokens: int
    sampling: Sampling

    @classmethod
    def of(cls, given: dict[str, Any], usual: Mapping[str, float]) -> TextSettings:
        """The settings of a request's ``generation_kwargs``, with the model's ``usual`` ones, as ``hf`` has them.

        Raises :class:`InputError` for those that are not known here.
        """
        named = normalize_gen_kwargs(given, _TOKENS)
        asked = {key: value for key, value in named.items() if value is not None and (key, value) not in _NO_EFFECT}
        stop, tokens, samples = asked.pop("until"), asked.pop("max_gen_toks"), asked.pop("do_sample")
        temperature = float(asked.pop("temperature", 0.0))
        if samples and not temperature:
            raise InputError("a task asks for do_sample=true without a temperature", fix="give it one above 0")
        penalty = asked.pop("repetition_penalty", usual.get("repetition_penalty", 1.0))
        top_k, top_p = (asked.pop(key, usual.get(key, value)) for key, value in (("top_k", 50), ("top_p", 1.0)))
        if asked:
            why = "known are until, max_gen_toks, do_sample, temperature, top_k, top_p and repetition_penalty"
            raise InputError(f"a task asks for {', '.join(asked)} in its generation_kwargs", why=why)
        sampling = Sampling(temperature if samples else 0.0, int(top_k), float(top_p), float(penalty))
        return cls(tuple(each for each in stop if each), tokens, sampling)


def _short(text: str) -> str:
    return repr(text if len(text) <= 40 else f"...{text[-40:]}")


def find_tasks(names: Iterable[str], folder: str | None = None) -> TaskManager:
    """The harness's tasks, and those in ``folder``. Raises :class:`InputError` where one of ``names`` is not there."""
    if folder is not None and not Path(folder).is_dir():
        raise InputError(f"there is no folder {folder}", origin="--include", fix=near_path(Path(folder)))
    manager = TaskManager(include_path=folder)
    for task in names:
        if not manager.match_tasks([task]):
            raise InputError(f"the harness knows no task {task!r}", fix=did_you_mean(task, manager.all_tasks))
    return manager


def run_harness(
    model: LoadedModel,
    manager: TaskManager,
    names: Sequence[str],
    *,
    shots: int | None = None,
    batch: int = 8,
    chat: bool = False,
) -> dict[str, dict[str, Any]]:
    """The metrics of the tasks ``names`` of ``manager``, by name; ``shots`` examples precede each question.

    ``chat`` asks through the model's own chat template, an example being a turn.
    """
    answer = simple_evaluate(
        HarnessModel(model, batch),
        tasks=list(names),
        num_fewshot=shots,
        task_manager=manager,
        bootstrap_iters=0,
        apply_chat_template=chat,
    )
    results: dict[str, dict[str, Any]] = answer["results"]
    return results
