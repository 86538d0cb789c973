"""The megatron-run command: click commands over the kernel, with no logic of their own."""
