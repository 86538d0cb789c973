"""lm-evaluation-harness (https://github.com/EleutherAI/lm-evaluation-harness) on a model of ours, on any topology.

Every rank runs the harness on the same requests, which are scored and generated together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lm_eval import simple_evaluate
from lm_eval.api.model import TemplateLM
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows

from megatron_run.errors import DataError, InputError, did_you_mean
from megatron_run_engine.inference.writing import Writing
from megatron_run_engine.runtime.generation import Score, Window, score

if TYPE_CHECKING:
    from megatron_run_engine.inference.loaded_model import LoadedModel

#: Tokens that a task gets which does not say how many it wants, as for the harness's own models.
_TOKENS = 256


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
        self._begins_with, self._prefix = named.get("bos") or named.get("eos") or ("", self._end)

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        return self._end

    @property
    def prefix_token_id(self) -> int:
        """The token with which an empty text begins: the tokenizer's first, else the one that ends a text."""
        return self._prefix

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
        groups: dict[tuple[Any, ...], list[int]] = {}
        for number, request in enumerate(requests):
            groups.setdefault(_settings(request.args[1]), []).append(number)
        for (stop, tokens, temperature, top_k, top_p), numbers in groups.items():
            writing = Writing(tokens, temperature=temperature, top_k=top_k, top_p=top_p, stop=stop)
            for start in range(0, len(numbers), self._batch):
                part = numbers[start : start + self._batch]
                prompts = [self._prompt(requests[number].args[0], tokens) for number in part]
                for number, text in zip(part, self._model.write(prompts, writing), strict=True):
                    texts[number] = text.text or ""
        return texts

    def _prompt(self, context: str, tokens: int) -> list[int]:
        """The end of ``context`` that leaves room for ``tokens`` more."""
        room = max(1, self._model.positions - tokens)
        return (self.tok_encode(context) or [self._prefix])[-room:]

    def _score(self, windows: Sequence[Window]) -> list[Score]:
        return score(self._model.network, windows, self._batch)


def _settings(given: dict[str, Any]) -> tuple[tuple[str, ...], int, float, int, float]:
    """Stop strings, tokens, temperature, top-k and top-p of a request, in the words of transformers' ``generate``."""
    until = given.get("until") or ()
    stop = (until,) if isinstance(until, str) else tuple(until)
    tokens = int(given.get("max_gen_toks") or given.get("max_new_tokens") or _TOKENS)
    if not given.get("do_sample", False):
        return stop, tokens, 0.0, 0, 1.0
    return (
        stop,
        tokens,
        float(given.get("temperature", 1.0)),
        int(given.get("top_k", 0)),
        float(given.get("top_p", 1.0)),
    )


def run_harness(
    model: LoadedModel, names: Sequence[str], *, folder: str | None = None, shots: int | None = None, batch: int = 8
) -> dict[str, dict[str, Any]]:
    """The metrics of the tasks ``names``, by name. ``folder`` holds more; ``shots`` examples precede each question.

    Raises :class:`InputError` for a task that the harness does not know.
    """
    manager = TaskManager(include_path=folder)
    for task in names:
        if not manager.match_tasks([task]):
            raise InputError(f"the harness knows no task {task!r}", fix=did_you_mean(task, manager.all_tasks))
    answer = simple_evaluate(
        HarnessModel(model, batch), tasks=list(names), num_fewshot=shots, task_manager=manager, bootstrap_iters=0
    )
    results: dict[str, dict[str, Any]] = answer["results"]
    return results
