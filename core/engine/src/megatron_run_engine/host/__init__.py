"""The host of a rank: the world in which a process was started, its environment, threads, device and kernels.

``environments`` reads torchrun's and Slurm's variables, ``rank_environment`` sets what must be set before torch is
imported, ``process`` chooses the device, prepares the process and gives everything back.

Imports: errors, files, planning, runtime.
"""
