"""Right: sorted buckets, and rows of padding joined on."""

import torch

from tinyengine.model.inputs import DecodeInputs


def choose_bucket(batch, buckets):
    for bucket in sorted(buckets):
        if bucket >= batch:
            return bucket
    return None


def pad(inputs, bucket, width):
    n, columns = inputs.block_table.shape
    more = bucket - n
    table = torch.cat([inputs.block_table, inputs.block_table.new_zeros(n, width - columns)], 1)
    return DecodeInputs(
        torch.cat([inputs.input_ids, inputs.input_ids.new_zeros(more)]),
        torch.cat([inputs.positions, inputs.positions.new_zeros(more)]),
        torch.cat([inputs.slot_mapping, inputs.slot_mapping.new_zeros(more)]),
        torch.cat([table, table.new_zeros(more, width)]),
        torch.cat([inputs.context_lens, inputs.context_lens.new_ones(more)]),
    )
