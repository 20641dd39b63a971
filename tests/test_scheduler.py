"""The scheduler alone, with no model: admission, chunking, preemption, and that every request ends."""

from hypothesis import given, settings
from hypothesis import strategies as st

from tinyengine.kv.blocks import BlockAllocator, BlockTable, blocks_needed
from tinyengine.kv.prefix import PrefixCache
from tinyengine.sampling import SamplingParams
from tinyengine.scheduler import MAX_PREFILLS_IN_A_ROW, Scheduler
from tinyengine.sequence import Sequence

BLOCK = 4


def make(num_blocks=100, max_num_seqs=8, budget=16):
    return Scheduler(PrefixCache(BlockAllocator(num_blocks)), max_num_seqs, budget)


def add(scheduler, prompt_len, max_tokens=5, request_id=0, max_len=10_000):
    table = BlockTable(scheduler.allocator, BLOCK)
    seq = Sequence(request_id, list(range(prompt_len)), SamplingParams(max_tokens=max_tokens), table, max_len)
    scheduler.add(seq)
    return seq


def run(scheduler, step, remember=False):
    """What the engine does with a step, the model left out: token 7 for every sequence that has none pending."""
    for seq, count in step.chunks:
        seq.num_computed += count
        if remember:
            scheduler.remember(seq)
        if not seq.pending:
            seq.token_ids.append(7)
            if seq.is_full:
                scheduler.remove(seq)


def counts(step):
    return [(seq.request_id, count) for seq, count in step.chunks]


def test_an_idle_scheduler_has_no_step():
    assert make().schedule() is None


def test_prompts_share_a_prefill_step_then_decode_together():
    scheduler = make()
    for i, length in enumerate((3, 5, 2)):
        add(scheduler, length, request_id=i)
    first = scheduler.schedule()
    assert (first.is_decode, counts(first)) == (False, [(0, 3), (1, 5), (2, 2)])
    run(scheduler, first)
    second = scheduler.schedule()
    assert (second.is_decode, counts(second)) == (True, [(0, 1), (1, 1), (2, 1)])


def test_a_long_prompt_is_cut_to_the_budget():
    scheduler = make(budget=10)
    add(scheduler, 6, request_id=0)
    add(scheduler, 17, request_id=1)
    seen = []
    for _ in range(3):
        step = scheduler.schedule()
        seen.append(counts(step))
        run(scheduler, step)
    # The last token of the long prompt runs as a decode: one pending token is one pending token.
    assert seen == [[(0, 6), (1, 4)], [(1, 10)], [(1, 3)]]
    assert all(seq.pending == 1 for seq in scheduler.running)


def test_no_more_sequences_run_than_allowed_and_the_rest_come_in_order():
    scheduler = make(max_num_seqs=2)
    seqs = [add(scheduler, 3, max_tokens=2 + i, request_id=i) for i in range(4)]
    order = []
    while not scheduler.is_idle:
        step = scheduler.schedule()
        assert len(scheduler.running) <= 2
        order += [i for i, _ in counts(step) if not step.is_decode]
        run(scheduler, step)
    assert order == [0, 1, 2, 3]
    assert all(not seq.table.blocks for seq in seqs)


def test_the_youngest_is_preempted_and_computed_again():
    scheduler = make(num_blocks=6)  # five usable blocks of four tokens
    old, young = (add(scheduler, 7, max_tokens=10, request_id=i) for i in range(2))
    preempted = False
    while not scheduler.is_idle:
        step = scheduler.schedule()
        if young.num_computed == 0 and len(young) > 7 and young in scheduler.waiting:
            preempted = True
            assert old in scheduler.running and not young.table.blocks
        run(scheduler, step)
    assert preempted and scheduler.num_preemptions >= 1
    assert len(old) == len(young) == 17


def test_a_preempted_sequence_goes_before_those_that_have_never_run():
    scheduler = make(num_blocks=6, max_num_seqs=2)
    seqs = [add(scheduler, 7, max_tokens=10, request_id=i) for i in range(3)]
    while not scheduler.num_preemptions:
        run(scheduler, scheduler.schedule())
    assert [seq.request_id for seq in scheduler.waiting] == [1, 2]
    while not scheduler.is_idle:
        run(scheduler, scheduler.schedule())
    assert all(seq.is_full for seq in seqs)


def test_admission_leaves_each_running_sequence_a_block_to_grow_into():
    scheduler = make(num_blocks=5)  # four usable
    old = add(scheduler, 8, max_tokens=20, request_id=0)
    run(scheduler, scheduler.schedule())
    add(scheduler, 8, request_id=1)  # two blocks are free, but the old one is about to need one
    assert counts(scheduler.schedule()) == [(0, 1)] and scheduler.running == [old]


def test_new_prompts_do_not_silence_those_that_are_being_answered():
    scheduler = make(num_blocks=1000, max_num_seqs=500)
    old = add(scheduler, 3, max_tokens=10, request_id=0)
    for i in range(1, 200):
        add(scheduler, 6, max_tokens=1, request_id=i)
        run(scheduler, scheduler.schedule())
        if old.is_full:
            break
    assert old.is_full and i <= 10 * (MAX_PREFILLS_IN_A_ROW + 1)


def test_what_one_prompt_computes_is_shared_by_the_next_but_never_its_last_token():
    scheduler = make(budget=8)
    first, same = (add(scheduler, 8, max_tokens=3, request_id=i) for i in range(2))
    longer = add(scheduler, 11, max_tokens=3, request_id=2)
    step = scheduler.schedule()
    assert counts(step) == [(0, 8)], "the others wait until they can share"
    run(scheduler, step, remember=True)
    step = scheduler.schedule()
    assert counts(step) == [(1, 4), (2, 3)], "one block of two, since a token must be computed; and both"
    assert same.table.blocks[0] == first.table.blocks[0] and same.table.blocks[1] != first.table.blocks[1]
    assert longer.table.blocks[:2] == first.table.blocks and scheduler.num_cached_tokens == 4 + 8


def test_removing_a_waiting_sequence_frees_nothing_and_loses_nothing():
    scheduler = make(max_num_seqs=1)
    running, waiting = (add(scheduler, 3, request_id=i) for i in range(2))
    run(scheduler, scheduler.schedule())
    scheduler.remove(waiting)
    scheduler.remove(running)
    assert scheduler.is_idle and scheduler.allocator.num_used == 0


requests = st.lists(st.tuples(st.integers(1, 30), st.integers(1, 12), st.integers(0, 10)), min_size=1, max_size=12)


@settings(max_examples=150, deadline=None)
@given(
    requests,
    st.integers(12, 40),
    st.integers(1, 6),
    st.integers(1, 40),
    st.booleans(),
    st.randoms(use_true_random=False),
)
def test_every_request_ends_and_no_block_is_leaked_or_used_by_two(work, num_blocks, max_seqs, budget, remember, rng):
    """All prompts begin alike, so with the prefix cache they share what they can."""
    scheduler = make(num_blocks, max_seqs, budget)
    arrivals = sorted((when, i, prompt, tokens) for i, (prompt, tokens, when) in enumerate(work))
    seqs, aborted, now = [], set(), 0
    while arrivals or not scheduler.is_idle:
        while arrivals and arrivals[0][0] <= now:
            _, i, prompt, tokens = arrivals.pop(0)
            seqs.append(add(scheduler, prompt, tokens, i, max_len=(num_blocks - 1) * BLOCK))
        step = scheduler.schedule()
        if step is not None:
            check_step(scheduler, step, max_seqs, budget)
            run(scheduler, step, remember)
        if rng.random() < 0.05 and not scheduler.is_idle:
            victim = rng.choice([*scheduler.running, *scheduler.waiting])
            scheduler.remove(victim)
            aborted.add(victim.request_id)
        now += 1
        assert now < 2000, "some request never ends"
    assert scheduler.allocator.num_used == 0
    assert all(seq.is_full for seq in seqs if seq.request_id not in aborted)


def check_step(scheduler, step, max_seqs, budget):
    held = {}
    for seq in scheduler.running:
        for i, block in enumerate(seq.table.blocks):
            tokens = tuple(seq.token_ids[: (i + 1) * BLOCK])
            assert held.setdefault(block, tokens) == tokens, "held by two that differ"
            shared = scheduler.allocator.ref_count(block) > 1
            assert not shared or seq.num_computed >= (i + 1) * BLOCK, "what is shared is written by nobody"
    assert len(held) == scheduler.allocator.num_used, "leaked"
    assert 0 not in held and all(not seq.table.blocks for seq in scheduler.waiting)
    assert 0 < len(step.chunks) <= len(scheduler.running) <= max_seqs
    assert step.is_decode or step.num_tokens <= budget
    for seq, count in step.chunks:
        assert 1 <= count <= seq.pending
        assert len(seq.table.blocks) == blocks_needed(len(seq), BLOCK)
