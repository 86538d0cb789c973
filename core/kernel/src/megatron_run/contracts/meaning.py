"""The meaning of an option to a run that goes on and to saved weights, said by the field itself.

``loss_chunks: Annotated[int, NOT_LEARNED] = Field(1, ge=1)`` in a plugin's options, or in a group inside them, is all
that resuming, ``run.init_from``, exports and ``config explain`` need to know. A field of a derived model says it again.

Marks count in the sections that decide what is learned (:data:`LEARNED`). There, without one, a change needs
``--allow-change``, and one of a model never happens within a run, nor between a run and the weights from which it
starts. Options of other kinds, as of observers, may change between attempts, whatever they say.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True)
class Meaning:
    """A mark of a field; ``text`` says it to the user."""

    text: str


#: How it is computed, and not what is learned: limits, counters, communication and memory.
NOT_LEARNED = Meaning("may change between attempts, which learn the same")
#: How a model is trained, and not what its weights compute.
OF_TRAINING = Meaning("may differ from the weights' training; a resumed run needs --allow-change")
#: The weights stay those that they are, and compute something else: how positions grow.
FREE_OF_WEIGHTS = Meaning("may differ for the same weights; a resumed run needs --allow-change")
#: Of a part that may be new where a model starts from other weights, such as a head.
OF_NEW_PART = Meaning("may differ from the model of run.init_from; a resumed run has it as it was")
#: Gives the saved state its meaning.
FIXED = Meaning("never changes within a run")

#: Lets an option of a model differ between attempts. Every other one gives the weights their meaning.
BETWEEN_ATTEMPTS = frozenset({NOT_LEARNED, OF_TRAINING, FREE_OF_WEIGHTS})
#: Of what changes nothing that the same weights compute.
SAME_COMPUTATION = frozenset({NOT_LEARNED, OF_TRAINING})

#: Sections that decide what is learned. The others (run, parallel, eval, guard, schedule, parallel_layer,
#: graph_capture, observer) decide where and how fast it runs and what is observed. They may change between attempts:
#: losses then agree to rounding.
LEARNED = ("version", "model", "train", "data", "optimizer", "scaler")
#: The length of a run, of which one key is set.
LENGTH = frozenset({"train.steps", "train.samples"})


def change_of(key: str, marks: Collection[Meaning]) -> str:
    """Whether a run that goes on may have another value of ``key``, whose field has ``marks``: for the user."""
    section = key.partition(".")[0]
    if section not in LEARNED:
        return "may change between attempts"
    if marks:
        return "; ".join(mark.text for mark in marks)
    if section in ("model", "version"):
        return FIXED.text
    longer = "a longer run needs --extend, a shorter one " if key in LENGTH else "a resumed run needs "
    return f"{longer}--allow-change {key}"
