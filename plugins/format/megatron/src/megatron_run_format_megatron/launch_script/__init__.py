"""A launch script of Megatron-LM becomes a configuration. Needs no torch.

Reading order: ``script`` (the words of the training command), ``flags`` (the table of flags), ``settings`` (what the
flags say, with Megatron's defaults), ``model_section``, ``attention_section``, ``data_section``, ``layer_kernels`` and
``run_keys`` (the keys they become), ``translate`` (the whole configuration, as YAML).
"""
