"""Prefix caching: what is found is what was computed, the least recently used goes, and no token changes."""

import random

import pytest
import torch
from conftest import BLOCK_BYTES
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule
from test_blocks import Owners

from tinyengine.engine import Engine
from tinyengine.errors import BlockError
from tinyengine.kv.blocks import BlockAllocator
from tinyengine.kv.prefix import PrefixCache, extend_digests
from tinyengine.sampling import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)


# ---- digests ----


def test_a_digest_stands_for_a_whole_beginning():
    chain = extend_digests([], list(range(12)), 4)
    assert len(chain) == 3 == len(set(chain)) and extend_digests([], list(range(15)), 4) == chain
    other = extend_digests([], [0, 1, 2, 99, *range(4, 12)], 4)
    assert set(chain).isdisjoint(other), "one token differs, and so does all that follows"
    assert extend_digests([], [0, 1, 2, 3] * 2, 4)[0] == chain[0] != extend_digests([], [0, 1, 2, 3] * 2, 4)[1]


def test_a_chain_grows_with_its_tokens():
    chain, tokens = [], []
    for token in range(20):
        tokens.append(token)
        assert extend_digests(chain, tokens, 4) is chain
    assert chain == extend_digests([], tokens, 4)


# ---- the allocator ----


def remembered(blocks=6):
    """Blocks 1 to 3 hold a chain, and nobody owns them."""
    cache, chain = PrefixCache(BlockAllocator(blocks)), extend_digests([], list(range(12)), 4)
    owned = cache.allocate(3)
    for block, digest in zip(owned, chain, strict=True):
        cache.remember(block, digest)
    cache.free(reversed(owned))
    return cache, chain


def test_an_idle_block_is_free_and_whole_until_it_is_needed():
    cache, chain = remembered()
    assert (cache.num_free, cache.num_used) == (5, 0) and cache.find(chain) == [1, 2, 3] and cache.num_idle([1, 4]) == 1
    cache.share([1, 2])
    assert (cache.num_free, cache.ref_count(1), cache.ref_count(3)) == (3, 1, 0)
    cache.share([1])
    cache.free([1, 2, 1])
    assert cache.find(chain) == [1, 2, 3] and cache.num_used == 0


def test_empty_blocks_go_first_and_then_the_end_of_what_was_used_least_recently():
    cache, chain = remembered()
    assert cache.allocate(2) == [4, 5] and cache.find(chain) == [1, 2, 3]
    assert cache.allocate(1) == [3] and cache.find(chain) == [1, 2], "the last block of a table is given back first"
    cache.share([1])
    cache.free([1])
    assert cache.allocate(1) == [2], "block 1 was used since"
    assert cache.find(chain) == [1]
    with pytest.raises(BlockError, match="are free"):
        cache.allocate(2)


def test_two_that_compute_the_same_keep_the_first():
    cache, chain = remembered()
    (again,) = cache.allocate(1)
    cache.remember(again, chain[0])
    assert cache.find(chain[:1]) == [1]
    cache.free([again])
    assert cache.num_idle([again]) == 0
    with pytest.raises(BlockError, match="nobody owns"):
        cache.remember(again, chain[0])


def test_an_idle_block_may_get_several_owners_at_once():
    cache, _ = remembered()
    cache.share([1, 2, 1])
    assert (cache.ref_count(1), cache.ref_count(2)) == (2, 1) and cache.num_idle([1, 2, 3]) == 1


def test_an_idle_block_cannot_be_freed_again():
    cache, chain = remembered()
    cache.share([2])
    for blocks in ([1], [2, 1], [2, 2]):
        with pytest.raises(BlockError, match="not in use"):
            cache.free(blocks)
    assert cache.find(chain) == [1, 2, 3] and [cache.ref_count(b) for b in (1, 2, 3)] == [0, 1, 0]


def test_what_is_forgotten_is_not_found():
    cache, chain = remembered()
    cache.share([1])
    cache.forget([1, 3, 5])
    assert cache.find(chain) == [] and cache.find(chain[1:]) == [2]
    assert cache.num_free == 4 and cache.ref_count(1) == 1
    cache.free([1])
    assert cache.allocate(4) == [1, 3, 4, 5], "the lowest empty blocks first"


class Remembering(Owners):
    """The owners of test_blocks.py over a cache; `holds` says what a block really holds."""

    def __init__(self):
        super().__init__()
        self.allocator = PrefixCache(BlockAllocator(12))
        self.holds = {}

    @rule()
    def begin(self):
        super().begin()

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), tokens=st.integers(0, 20))
    def grow(self, data, tokens):
        before = {block for table in self.tables for block in table.blocks}
        super().grow(data, tokens)
        for block in {block for table in self.tables for block in table.blocks} - before:
            self.holds.pop(block, None)

    @precondition(lambda self: any(table.blocks for table in self.tables))
    @rule(data=st.data(), digest=st.integers(0, 8))
    def remember(self, data, digest):
        block = data.draw(st.sampled_from([block for table in self.tables for block in table.blocks]))
        if block not in self.holds:
            self.holds[block] = digest
            self.allocator.remember(block, digest)

    @rule(digest=st.integers(0, 8))
    def find_and_share(self, digest):
        found = self.allocator.find([digest])
        assert all(self.holds[block] == digest for block in found)
        self.allocator.share(found)
        self.copies.append(found)

    @rule(block=st.integers(1, 11))
    def forget(self, block):
        self.allocator.forget([block])
        assert all(block not in self.allocator.find([digest]) for digest in range(9))


TestRemembering = Remembering.TestCase
TestRemembering.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


# ---- the engine ----


def with_prefix(count, prefix=70, seed=0):
    rng = random.Random(seed)
    shared = [rng.randrange(3, 259) for _ in range(prefix)]
    return [shared + [rng.randrange(3, 259) for _ in range(rng.randrange(1, 8))] for _ in range(count)]


def alone(folder, prompts, params):
    """Each in an engine that has seen nothing before."""
    return [Engine(folder, device="cpu").generate([prompt], params, progress=False)[0].token_ids for prompt in prompts]


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("blocks", [16, 200])
def test_a_shared_prefix_is_computed_once_and_no_token_changes(families, ahead, blocks):
    folder, prompts = families["llama"][1], with_prefix(30)
    engine = Engine(folder, device="cpu", kv_bytes=blocks * BLOCK_BYTES, max_num_batched_tokens=80)
    engine._runs_ahead = ahead
    done = engine.generate(prompts, GREEDY, progress=False)
    assert [c.token_ids for c in done] == alone(folder, prompts, GREEDY)
    if blocks == 200:
        total = sum(map(len, prompts))
        assert engine.stats.prefill_tokens + engine.stats.decode_tokens <= 0.25 * total + 30 * GREEDY.max_tokens
        assert engine.scheduler.num_cached_tokens >= 29 * 64 - 80
    assert engine.scheduler.allocator.num_used == 0


def test_a_later_request_finds_prompt_and_answer_of_an_earlier_one(families):
    folder, (prompt,) = families["qwen3"][1], with_prefix(1)
    engine = Engine(folder, device="cpu")
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    (first,) = engine.generate([prompt], params)
    before = engine.stats.prefill_tokens
    asked = prompt + first.token_ids + [5, 6, 7]
    (second,) = engine.generate([asked], params)
    assert engine.stats.prefill_tokens - before < 16 + 4 and second.token_ids == alone(folder, [asked], params)[0]


def test_the_same_prompt_again_computes_its_last_block_alone(families):
    engine = Engine(families["llama"][1], device="cpu")
    prompt = with_prefix(1, prefix=64)[0][:64]
    (first,) = engine.generate([prompt], GREEDY)
    (again,) = engine.generate([prompt], GREEDY)
    assert first.token_ids == again.token_ids and engine.scheduler.num_cached_tokens == 48
    assert engine.stats.prefill_tokens == 64 + 16


def test_nothing_that_is_broken_is_shared(families):
    """A request that was aborted over numbers that are none takes what it computed with it."""
    engine = Engine(families["llama"][1], device="cpu")
    prompt = [7, *with_prefix(1)[0]]
    (before,) = Engine(families["llama"][1], device="cpu").generate([prompt], GREEDY)
    kept = engine.params.embed[7].clone()
    engine.params.embed[7] = float("inf")
    assert engine.generate([prompt], GREEDY)[0].finish_reason == "abort"
    engine.params.embed[7] = kept
    assert engine.generate([prompt], GREEDY)[0].token_ids == before.token_ids
    assert engine.scheduler.num_cached_tokens == 0


def test_new_weights_need_the_cache_to_be_reset(families):
    engine, prompt = Engine(families["llama"][1], device="cpu"), with_prefix(1)[0]
    engine.generate([prompt], GREEDY)
    running = engine.add_request(prompt[:20], SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))
    for _ in range(3):
        engine.step()
    engine.params.layers[0].down.mul_(-3)
    engine.reset_prefix_cache()
    while engine.has_unfinished:
        engine.step()
    assert running == 1
    (fresh,) = engine.generate([prompt], GREEDY)
    other = Engine(families["llama"][1], device="cpu")
    other.params.layers[0].down.mul_(-3)
    assert fresh.token_ids == other.generate([prompt], GREEDY)[0].token_ids


def test_an_abort_leaves_those_that_share_with_it_alone(families):
    folder, prompts = families["llama"][1], with_prefix(3)
    engine = Engine(folder, device="cpu", max_num_batched_tokens=80)
    ids, done = [engine.add_request(prompt, GREEDY) for prompt in prompts], {}
    while len(engine.scheduler.running) < 3:
        engine.step()
    engine.abort(ids[0])
    while engine.has_unfinished:
        done.update({o.request_id: o.completion.token_ids for o in engine.step() if o.completion})
    expected = alone(folder, prompts, GREEDY)
    assert [done[i] for i in ids[1:]] == expected[1:]


@pytest.mark.cuda
def test_512_requests_with_a_prefix_of_1024_tokens_prefill_a_tenth_and_say_the_same():
    """Float32, in which a shared prefix changes no token; without sharing each prompt is alone in an engine."""
    rng = random.Random(0)
    shared = [rng.randrange(300, 10_000) for _ in range(1024)]
    prompts = [shared + [rng.randrange(300, 10_000) for _ in range(rng.randrange(8, 33))] for _ in range(512)]
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    options = dict(device="cuda", dtype="float32", max_model_len=1100, kv_bytes=40 << 30)
    engine = Engine("qwen3-0.6b", **options)
    cached = engine.generate(prompts, params, progress=False)
    assert engine.stats.prefill_tokens <= 0.1 * sum(map(len, prompts))
    plain = Engine("qwen3-0.6b", **options)
    plain.scheduler.remember = lambda seq: None
    without = plain.generate(prompts, params, progress=False)
    total = sum(map(len, prompts))
    assert total - 512 <= plain.stats.prefill_tokens <= total, "the last token of a chunked prompt runs as a decode"
    same = [a.token_ids == b.token_ids for a, b in zip(cached, without, strict=True)]
    assert sum(same) >= 508, f"{sum(same)} of 512: random weights make a few close choices"
    torch.cuda.empty_cache()
