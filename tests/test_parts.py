"""Every part can stand in for the engine's own, and is what the engine then runs."""

from collections import Counter
from dataclasses import fields
from functools import wraps

import pytest
from conftest import BLOCK_BYTES

from tinyengine import Engine, SamplingParams
from tinyengine.parts import Parts

PROMPTS = [list(range(5, 5 + n)) for n in (40, 7, 21, 3)]
PARAMS = [SamplingParams(temperature=t, top_k=k, top_p=0.9, seed=3, max_tokens=30) for t, k in ((0, 0), (1, 5)) * 2]


@pytest.fixture(scope="module")
def counted():
    """Parts that count how often each is called."""
    calls = Counter()

    def counting(name, part):
        @wraps(part, updated=())
        def call(*args, **kwargs):
            calls[name] += 1
            return part(*args, **kwargs)

        return call

    own = Parts()
    return calls, Parts(**{f.name: counting(f.name, getattr(own, f.name)) for f in fields(Parts)})


def test_the_engine_runs_every_part_that_it_is_given(families, counted):
    _, folder = families["llama"]
    calls, parts = counted
    options = dict(
        device="cpu", kv_bytes=8 * BLOCK_BYTES, graphs="on", max_model_len=80
    )  # so few blocks that some give way
    plain, engine = Engine(folder, **options), Engine(folder, **options, parts=parts)
    expected = [c.token_ids for c in plain.generate(PROMPTS, PARAMS)]
    assert [c.token_ids for c in engine.generate(PROMPTS, PARAMS)] == expected
    assert engine.scheduler.num_preemptions and engine.runner.replays
    assert set(calls) == {f.name for f in fields(Parts)}
