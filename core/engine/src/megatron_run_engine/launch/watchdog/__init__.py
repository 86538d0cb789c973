"""The watchdog: names the rank that hangs, is stopped or is lost, from outside its process.

Each rank keeps a status page (``page``) in a file that is mapped into its memory. The local launcher reads the pages
of all its ranks (``monitor``) and judges them (``verdict``). Where torchrun or Slurm started the ranks, each starts a
small process beside it, its ``sidecar`` (``sidecar_client`` is the rank's side), which reads the rank's page and
reports to the ``hub``, a thread of rank 0's sidecar: that one judges, and tells every sidecar to end its rank.

Heartbeat threads on the ranks' TCPStore would not do: SIGSTOP of a rank 0 that serves the store blocks every other rank
inside its store call; a rank that holds the interpreter lock publishes nothing more; and SIGKILL of rank 0 takes the
store along, so that the others agree neither on the reason nor on who writes ``status.json``.

No part of it imports torch, and nothing of it runs in the training loop but the writing of the page. May import what
``launch`` may, and of ``launch`` nothing.
"""
