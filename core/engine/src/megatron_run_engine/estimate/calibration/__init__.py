"""Measures this machine for the planner: operators, links between ranks, and steps of real runs.

:mod:`.microbenchmarks` times products, sweeps and attention in one thread, and what ranks say to each other;
:mod:`.timed_run` times whole runs, action by action. :mod:`.on_ranks` runs each of them in fresh processes that have
the environment of a training's ranks; :mod:`.survey` says what is measured, and joins the rounds. What the numbers mean
for a prediction is the planner's to say.
"""
