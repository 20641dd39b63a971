"""Right: try counts until one fits."""


def admit(needs, num_running, num_free, max_num_seqs):
    started = 0
    for need in needs:
        if num_running == max_num_seqs or num_free - need < num_running:
            return started
        num_free -= need
        num_running += 1
        started += 1
    return started


def preempt(missing, released, num_free):
    n = len(missing)
    for victims in range(n):
        left = n - victims
        if sum(missing[:left]) <= num_free + sum(released[left:]):
            return victims
    return n
