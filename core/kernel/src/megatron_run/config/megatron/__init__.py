"""What Megatron-LM's command line says, in words of ours: flags, the scripts they stand in, and what becomes of them.

Reading order: ``script`` (the words of a launch script), ``flags`` (the table), ``model`` (the network), ``translate``
(all sections), ``write`` (the YAML).
"""
