"""Right: bit masks, and the largest taken out again and again."""


def _up(n, bits):
    mask = (1 << bits) - 1
    return (n + mask) & ~mask


def round_size(nbytes):
    return _up(nbytes or 1, 9)


def segment_size(size):
    kinds = ((1 << 20, 2 << 20), ((10 << 20) - 1, 20 << 20))
    return next((segment for most, segment in kinds if size <= most), _up(size, 21))


def capture_order(pairs):
    left, order = list(pairs), []
    while left:
        order.append(max(left))
        left.remove(order[-1])
    return order
