"""The megatron-run command: a module per command, ``reports`` for what they print, ``templates`` for new plugins.

It imports the kernel, and the engine and the suites inside the commands that need them.
"""

#: A variable that torchrun gives a rank, and one that Slurm does.
RANK_VARIABLES = frozenset({"LOCAL_RANK", "SLURM_PROCID"})
