"""What a model declares that drops tokens in every microbatch but the first of a step, and what stages make of it."""

import torch

from megatron_run.contracts import Boundary, Microbatch


def boundary(microbatch: Microbatch, micro_batch_size: int, sequence_length: int) -> Boundary:
    tokens = None if microbatch.index > 0 else sequence_length  # only the sender knows how many are left
    return Boundary((tokens, micro_batch_size, 64), torch.float32)


for index in (0, 1):
    declared = boundary(Microbatch(index, step=1, sample0=2 * index, fields={}), 2, 128)
    output = torch.zeros(128 if index == 0 else 97, 2, 64)  # what the sender has made
    header = declared.unknown(output)
    print(f"declared {declared}, header {header}, received {declared.resolve(header)}")
