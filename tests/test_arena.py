"""The caching allocator's rules: by hand, against a trace of the real one, and over random workloads."""

import itertools
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tinyengine.graphs.arena import MIB, Address, Arena, Event, PoolBytes, round_size, small_segments

TRACE = json.loads((Path(__file__).parent / "data" / "h200_capture_trace.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("batch", TRACE["batches"])
def test_the_events_of_a_real_capture_give_the_segments_that_the_device_had(batch):
    recorded = TRACE["batches"][batch]
    arena = Arena()
    arena.play(Event(abs(number), nbytes) for number, nbytes in recorded["events"])
    assert sorted(segment.nbytes for segment in arena.segments) == sorted(recorded["segments"])


@pytest.mark.parametrize(
    "nbytes, segment",
    [
        (1, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 1, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB),
        (10 * MIB + 1, 12 * MIB),
        (33 * MIB, 34 * MIB),
    ],
)
def test_the_first_request_opens_a_segment_of_this_size(nbytes, segment):
    arena = Arena()
    arena.allocate(nbytes)
    assert [s.nbytes for s in arena.segments] == [segment]


def test_small_blocks_split_to_the_last_512_bytes_and_large_ones_only_above_a_mebibyte():
    arena = Arena()
    assert [arena.allocate(n) for n in (1, 513, 512)] == [Address(0, 0), Address(0, 512), Address(0, 1536)]
    assert arena.bytes == PoolBytes(2 * MIB, 512 + 1024 + 512)
    arena = Arena()
    arena.allocate(18 * MIB)  # a segment of its own, exactly
    arena.allocate(9 * MIB)  # 11 MiB of 20 remain: split
    arena.allocate(10 * MIB)  # 1 MiB would remain: not split, all 11 are live
    assert arena.bytes == PoolBytes(38 * MIB, 38 * MIB)


def test_the_smallest_free_block_that_fits_is_taken_and_then_the_lowest():
    arena = Arena()
    blocks = [arena.allocate(n) for n in (2048, 512, 1024, 512, 1024, 512)]
    for i in (4, 2, 0):
        arena.free(blocks[i])
    assert [arena.allocate(1000), arena.allocate(1000), arena.allocate(1000)] == [blocks[2], blocks[4], blocks[0]]


def test_neighbours_join_when_they_are_freed():
    arena = Arena()
    a, b, c = (arena.allocate(512) for _ in range(3))
    for block in (a, c, b):
        arena.free(block)
    assert arena.allocate(MIB) == a and arena.bytes.reserved == 2 * MIB
    with pytest.raises(KeyError):
        arena.free(b)


def test_a_block_serves_its_own_stream_alone():
    arena = Arena()
    arena.free(arena.allocate(512, stream=1))
    assert arena.allocate(512, stream=2).segment == 1, "what stream 1 left is not for stream 2"
    assert arena.allocate(512, stream=1).segment == 0


sizes = st.one_of(st.integers(1, 5000), st.integers(MIB - 600, MIB + 600), st.integers(1, 40 * MIB))


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(sizes, st.integers(0, 2)), max_size=60), st.randoms(use_true_random=False))
def test_live_blocks_never_overlap_and_nothing_is_lost(requests, rng):
    arena, live = Arena(), {}
    for nbytes, stream in requests:
        address = arena.allocate(nbytes, stream)
        assert address not in live
        live[address] = round_size(nbytes)
        if rng.random() < 0.5:
            gone = rng.choice(list(live))
            arena.free(gone)
            del live[gone]
        ends = sorted((a.segment, a.offset, a.offset + n) for a, n in live.items())
        for (segment, _, end), (next_segment, start, _) in itertools.pairwise(ends):
            assert segment != next_segment or end <= start
        assert all(end <= arena.segments[segment].nbytes for segment, _, end in ends)
        assert sum(live.values()) <= arena.bytes.live <= arena.bytes.reserved
    for address in live:
        arena.free(address)
    reserved = arena.bytes.reserved
    assert arena.bytes.live == 0
    for segment in list(arena.segments):  # all joined again: each segment can be handed out whole
        arena.allocate(MIB if segment.is_small else segment.nbytes, segment.stream)
    assert arena.bytes.reserved == reserved


def test_a_smaller_batch_may_need_more_small_segments_than_a_larger_one():
    """Three blocks of 1.5 MiB are large; at half the size they are small, and two of them fill a small segment."""
    events = [Event(i, 3 << 19) for i in range(3)]
    assert small_segments(events, [1.0]) == 0
    assert small_segments(events, [1.0, 0.5]) == 2
    assert small_segments(events, []) == 0
