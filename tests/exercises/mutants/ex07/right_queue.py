"""Right: a queue that is emptied, and a list that is popped."""

from collections import deque


def admit(needs, num_running, num_free, max_num_seqs):
    queue, running = deque(needs), num_running
    while queue and running < max_num_seqs and queue[0] + running <= num_free:
        num_free -= queue.popleft()
        running += 1
    return running - num_running


def preempt(missing, released, num_free):
    pairs = list(zip(missing, released, strict=True))
    while sum(pair[0] for pair in pairs) > num_free:
        num_free += pairs.pop()[1]
    return len(missing) - len(pairs)
