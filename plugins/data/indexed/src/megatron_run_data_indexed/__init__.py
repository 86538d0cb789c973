"""data=indexed: datasets in Megatron's .bin and .idx files."""
