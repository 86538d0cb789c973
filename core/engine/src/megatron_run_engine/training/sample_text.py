"""The sample of text at the end of a training (``eval.sample``)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_run_engine.runtime.generation import Generation, Network, Sampling, TextTokens
from megatron_run_engine.training.evaluate import set_training

if TYPE_CHECKING:
    from megatron_run.planning import ResolvedRun
    from megatron_run_engine.training.build import Assembly


def generate_text(run: ResolvedRun, assembly: Assembly) -> str | None:
    """Generate ``eval.sample`` tokens after ``eval.prompt``. Collective.

    Return None if the data is not text, or the model does not predict the next token.

    ``megatron-run generate --seed SEED``, with ``train.seed``, writes the same. Without a prompt the text begins after
    a line break, or where the tokenizer knows none, after the end of another text.
    """
    data, asked = assembly.data, run.config.eval
    prompt = data.encode(asked.prompt or "\n") if assembly.model.predicts_next else None
    if prompt is None:
        return None
    if not prompt and data.end_of_text is not None and data.end_of_text < assembly.context.vocab_size:
        prompt = [data.end_of_text]
    if not prompt:
        return None
    assembly.context.groups.activity.enter("generate")
    program = assembly.programs.forward_only(1)
    network = Network(
        assembly.context, assembly.model, assembly.chunks, assembly.executor, program, run.layout[-1].stage
    )
    text = TextTokens(list(prompt))
    sampling = Sampling(temperature=asked.temperature, seed=run.config.train.seed)
    set_training(assembly.chunks, training=False)
    for _ in Generation(network, [text], sampling).steps():
        text.ended = len(text.tokens) >= len(prompt) + asked.sample
    set_training(assembly.chunks, training=True)
    return data.decode(text.tokens)


def why_no_text(run: ResolvedRun, assembly: Assembly) -> str:
    """Return why :func:`generate_text` returned None, as a line for the user."""
    data, asked = run.one("data"), run.config.eval
    nothing = f"eval.sample={asked.sample} generates nothing"
    if not assembly.model.predicts_next:
        return f"{nothing}: {run.one('model')} does not predict the next token"
    if assembly.data.encode(asked.prompt or "\n") is None:
        return f"{nothing}: the samples of {data} are no text"
    return f"{nothing}: the tokenizer makes no token of eval.prompt={asked.prompt!r}; set one of words that it knows"
