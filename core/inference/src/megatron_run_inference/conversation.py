"""A talk with a model: what was said, and as much of it as the model reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from megatron_run.errors.wording import plural

if TYPE_CHECKING:
    from megatron_run_inference.loaded_model import LoadedModel
    from megatron_run_inference.text_stream import Completion
    from megatron_run_inference.writing import Writing


@dataclass
class Conversation:
    """A talk with ``model``, which answers as ``writing`` says, through the Jinja ``template`` or its own.

    ``system`` is what it reads before all turns. ``tell`` gets a line where turns are left out.
    """

    model: LoadedModel
    writing: Writing
    system: str | None = None
    template: str | None = None
    tell: Callable[[str], None] = print
    _turns: list[Mapping[str, Any]] = field(default_factory=list)

    def forget(self) -> None:
        """Start anew."""
        self._turns = []

    def ask(self, text: str, show: Callable[[str], None] | None = None) -> Completion:
        """The answer to ``text`` after all that was said; ``show`` gets its pieces as they come.

        Where the model's positions leave no room for an answer, the oldest turns are left out from here on. Raises as
        :meth:`LoadedModel.chat`; what was asked is then not part of the talk.
        """
        turns = self._fitting([*self._turns, {"role": "user", "content": text}])
        options = {name: value for name, value in vars(self.writing).items() if name != "num"}
        answer = self.model.chat(self._messages(turns), template=self.template, show=show, **options)
        self._turns = [*turns, {"role": "assistant", "content": answer.text or ""}]
        return answer

    def limit_of(self, answer: Completion) -> str | None:
        """The limit that has cut ``answer`` short; None where the model has ended it."""
        if answer.finish == "stop":
            return None
        size = len(answer.tokens)
        if size == self.writing.max_new_tokens:
            return f"max_new_tokens={size}"
        return f"the model's {self.model.positions} positions, after {plural(size, 'token')}"

    def _messages(self, turns: list[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        return turns if self.system is None else [{"role": "system", "content": self.system}, *turns]

    def _fitting(self, turns: list[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """The last of ``turns``, in pairs of question and answer, that leave room for another answer."""
        positions = self.model.positions
        longest = positions - min(self.writing.max_new_tokens, positions // 2)
        kept = turns
        while len(kept) > 1 and self._size(kept) > longest:
            kept = kept[2:]
        if len(kept) < len(turns) and self._size(kept) <= positions:  # else nothing is asked at all
            left = f"the {len(turns) - len(kept)} oldest of {len(turns)} messages are left out from here on"
            self.tell(f"{left}: the model reads {positions} tokens")
        return kept

    def _size(self, turns: list[Mapping[str, Any]]) -> int:
        return len(self.model.chat_tokens(self._messages(turns), template=self.template))
