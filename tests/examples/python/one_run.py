"""One run, and the numbers it leaves behind."""

from megatron_run import load_config
from megatron_run.planning import describe
from megatron_run_engine import train

run = load_config("preset:tiny", sets={"train.lr": 2e-3})
print(describe(run))  # plugins and why, ranks and their layers, the pipeline
result = train(run)

found = result.history.evaluations
for step, loss in zip(found["step"], found["loss"], strict=True):
    print(f"validation loss {loss:.3f} after {step} steps")
