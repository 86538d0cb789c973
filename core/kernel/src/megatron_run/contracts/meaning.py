"""The meaning of an option to a run that goes on and to saved weights, said by the field itself.

``loss_chunks: Annotated[int, NOT_LEARNED] = Field(1, ge=1)`` in a plugin's options, or in a group inside them, is all
that resuming, ``run.init_from``, exports and ``config explain`` need to know. A field of a derived model says it again.

Without a mark an option decides what is learned: a change of it needs ``--allow-change``, and one of a model never
happens within a run, nor between a run and the weights from which it starts.
"""

from __future__ import annotations

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
