"""Right: fresh padding, of which the first rows are overwritten."""

from tinyengine.model.inputs import DecodeInputs


def choose_bucket(batch, buckets):
    large_enough = {bucket for bucket in buckets if bucket >= batch}
    return min(large_enough) if large_enough else None


def pad(inputs, bucket, width):
    def filled(tensor, *shape, value=0):
        whole = tensor.new_full(shape, value)
        whole[tuple(slice(0, size) for size in tensor.shape)] = tensor
        return whole

    return DecodeInputs(
        input_ids=filled(inputs.input_ids, bucket),
        positions=filled(inputs.positions, bucket),
        slot_mapping=filled(inputs.slot_mapping, bucket),
        block_table=filled(inputs.block_table, bucket, width),
        context_lens=filled(inputs.context_lens, bucket, value=1),
    )
