"""Right: floor division and sorting."""

MIB = 1024 * 1024


def round_size(nbytes):
    return max(512, (nbytes + 511) // 512 * 512)


def segment_size(size):
    if size <= MIB:
        return 2 * MIB
    if size < 10 * MIB:
        return 20 * MIB
    return (size + 2 * MIB - 1) // (2 * MIB) * (2 * MIB)


def capture_order(pairs):
    return sorted(pairs, key=lambda pair: (-pair[0], -pair[1]))
