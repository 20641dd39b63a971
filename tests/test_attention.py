"""Both attention paths against attention written out, over shuffled blocks and ragged contexts."""

import contextlib
import warnings

import pytest
import torch

from tinyengine.errors import ConfigError
from tinyengine.kv.blocks import blocks_needed
from tinyengine.kv.cache import KVCache, KVLayout
from tinyengine.model import attention as attention_module
from tinyengine.model.attention import FlashAttention, GatherAttention, causal_attention, choose_attention
from tinyengine.model.config import ModelConfig
from tinyengine.model.inputs import DecodeInputs, PrefillInputs
from tinyengine.tolerance import TOLERANCE, relative_error


def config_of(heads, kv_heads, head_dim):
    return ModelConfig(
        vocab_size=10,
        hidden_size=heads * head_dim,
        intermediate_size=8,
        num_layers=1,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_position=512,
    )


def written_out(q, k, v):
    """softmax(q k / sqrt(d)) v, one head and one query at a time, in float64."""
    t, heads, dim = q.shape
    group = heads // k.shape[1]
    out = torch.empty(t, heads, dim, dtype=torch.float64)
    for i in range(t):
        seen = k.shape[0] - t + i + 1
        for h in range(heads):
            keys, values = k[:seen, h // group].double(), v[:seen, h // group].double()
            out[i, h] = (keys @ q[i, h].double() / dim**0.5).softmax(0) @ values
    return out


class Scene:
    """A cache with random K and V, and sequences whose blocks lie in it in random order."""

    def __init__(self, config, block_size, lens, dtype=torch.float32, device="cpu", seed=0):
        g = torch.Generator().manual_seed(seed)
        widths = [blocks_needed(n, block_size) for n in lens]
        order = torch.randperm(sum(widths) + 3, generator=g) + 1
        self.table = torch.zeros(len(lens), max(widths) + 1, dtype=torch.int32)  # one padding column
        for row, ids in zip(self.table, order[: sum(widths)].split(widths), strict=True):
            row[: len(ids)] = ids
        layout = KVLayout(1, config.num_kv_heads, config.head_dim, block_size, dtype)
        self.cache = KVCache(layout, len(order) + 1, device)
        self.cache.data.copy_(torch.randn(self.cache.data.shape, generator=g))
        self.table = self.table.to(device)
        self.lens, self.config, self.device, self.dtype = list(lens), config, device, dtype
        self.generator = g

    def kv(self, i):
        blocks = self.cache.layers[0][self.table[i].long()].flatten(0, 1)[: self.lens[i]].cpu()
        return blocks[:, 0], blocks[:, 1]

    def queries(self, n):
        shape = (n, self.config.num_heads, self.config.head_dim)
        return torch.randn(shape, generator=self.generator).to(self.device, self.dtype)

    def decode(self, attention):
        n = len(self.lens)
        q, lens = self.queries(n), torch.tensor(self.lens, dtype=torch.int32, device=self.device)
        none = torch.zeros(0, dtype=torch.int64)
        inputs = DecodeInputs(none, none, none, self.table, lens)
        got = attention.decode(q, self.cache.layers[0], attention.plan(inputs, self.cache))
        assert got.shape == q.shape and got.dtype == q.dtype
        return got, torch.cat([written_out(q[i : i + 1].cpu(), *self.kv(i)) for i in range(n)])

    def prefill(self, attention, chunks):
        q, none = self.queries(sum(chunks)), torch.zeros(0, dtype=torch.int64)
        inputs = PrefillInputs(none, none, none, self.table, tuple(chunks), tuple(self.lens))
        got = attention.prefill(q, self.cache.layers[0], attention.plan(inputs, self.cache))
        assert got.shape == q.shape and got.dtype == q.dtype
        parts = q.cpu().split(list(chunks))
        return got, torch.cat([written_out(part, *self.kv(i)) for i, part in enumerate(parts)])


GROUPS = [(4, 4, 16), (4, 2, 32), (8, 2, 16), (8, 1, 24)]
LENS, CHUNKS = (1, 7, 8, 9, 33), (1, 7, 3, 1, 20)


@pytest.mark.parametrize("shape", GROUPS, ids=str)
def test_gather_is_attention_written_out(shape):
    scene = Scene(config_of(*shape), 8, LENS)
    for got, expected in (scene.decode(GatherAttention()), scene.prefill(GatherAttention(), CHUNKS)):
        assert relative_error(got, expected) < TOLERANCE[torch.float32]


def test_causal_attention_sees_no_later_key():
    q, k, v = torch.randn(3, 2, 8), torch.randn(5, 2, 8), torch.randn(5, 2, 8)
    before = causal_attention(q, k, v)
    k[4], v[4] = 100, 100  # only the last query may see the last key
    after = causal_attention(q, k, v)
    assert before[:2].equal(after[:2]) and not before[2].equal(after[2])


@contextlib.contextmanager
def flash_stand_in():
    """PyTorch's flash kernel, for the time of a test, as a plain loop on the CPU with the kernel's own oddities."""

    def flash(q, k, v, cu_q, cu_k, max_q, max_k, dropout, causal, debug, *, scale=None, seqused_k=None, **_):
        assert cu_q.dtype == cu_k.dtype == torch.int32 and (seqused_k is None or seqused_k.dtype == torch.int32)
        out, lse = torch.zeros_like(q), torch.full((q.shape[1], q.shape[0]), float("inf"))
        group = q.shape[1] // k.shape[1]
        for i in range(len(cu_q) - 1):
            rows, start = slice(int(cu_q[i]), int(cu_q[i + 1])), int(cu_k[i])
            used = int(seqused_k[i]) if seqused_k is not None else int(cu_k[i + 1]) - start
            t = rows.stop - rows.start
            assert t <= max_q and used <= max_k
            if not used or not t:
                continue  # the kernel leaves 0 and an infinite log-sum-exp
            keys, values = (x[start : start + used].float().repeat_interleave(group, 1) for x in (k, v))
            scores = torch.einsum("qhd,khd->hqk", q[rows].float(), keys) * scale
            if causal:
                scores.masked_fill_(~torch.ones(t, used, dtype=torch.bool).tril(used - t), float("-inf"))
            lse[:, rows] = scores.logsumexp(-1)
            out[rows] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values).to(q.dtype)
        return (
            out,
            lse,
            torch.zeros(2, dtype=torch.uint64),
            torch.zeros((), dtype=torch.uint64),
            torch.empty(0),
        )

    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        library.impl("_flash_attention_forward", flash, "CPU")
    try:
        yield
    finally:
        library._destroy()


@pytest.mark.parametrize("lens, chunks", [(LENS, CHUNKS), ((1, 5, 8), (1, 2, 8))], ids=["several blocks", "one block"])
@pytest.mark.parametrize("few", [0, 2048], ids=["by block", "gathered"])
@pytest.mark.parametrize("shape", GROUPS, ids=str)
def test_flash_is_attention_written_out(monkeypatch, shape, few, lens, chunks):
    """Merged from blocks, with kv heads folded by 4, 2, 2 and 1, or split by the kernel over a copy."""
    monkeypatch.setattr(attention_module, "FEW_TOKENS", few)
    scene = Scene(config_of(*shape), 8, lens)
    with flash_stand_in():
        checks = [scene.decode(FlashAttention(scene.config))]
        checks.append(scene.prefill(FlashAttention(scene.config), chunks))
        scene.table = scene.table[:, :-1]  # without the padding column: a table of one block for the shorter lens
        checks.append(scene.decode(FlashAttention(scene.config)))
    for got, expected in checks:
        assert relative_error(got, expected) < TOLERANCE[torch.float32]


def test_flash_plans_a_batch_too_large_for_its_grid_for_gather(monkeypatch):
    monkeypatch.setattr(attention_module, "MAX_FLASH_SEQUENCES", 20)
    scene = Scene(config_of(4, 2, 16), 8, LENS)
    got, expected = scene.decode(FlashAttention(scene.config))  # no stand-in: the flash kernel would raise here
    assert relative_error(got, expected) < TOLERANCE[torch.float32]


def choose(name):
    return choose_attention(name, config_of(4, 2, 16), 16, torch.device("cpu"), torch.float32)


def test_the_cpu_gets_gather_and_flash_by_name_is_refused_with_the_reason():
    assert choose("auto").name == choose("gather").name == "gather"
    with pytest.raises(ConfigError, match="CUDA device"):
        choose("flash")
    with pytest.raises(ConfigError, match="choose auto, gather or flash"):
        choose("flush")


def test_a_flash_path_that_is_wrong_is_found_at_start(monkeypatch):
    monkeypatch.setattr(FlashAttention, "reason_against", staticmethod(lambda *_: None))
    with flash_stand_in():
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert choose("auto").name == "flash"
        original = FlashAttention._flash
        monkeypatch.setattr(FlashAttention, "_flash", lambda *a, **k: [x * 1.1 for x in original(*a, **k)])
        with pytest.warns(UserWarning, match="relative error") as caught:
            assert choose("auto").name == "gather"
        assert len(caught) == 1
        monkeypatch.setattr(FlashAttention, "_flash", lambda *a, **k: [x * float("nan") for x in original(*a, **k)])
        with pytest.warns(UserWarning, match="relative error nan"):
            assert choose("auto").name == "gather"
        monkeypatch.setattr(FlashAttention, "_flash", lambda *a, **k: [x * 1.1 for x in original(*a, **k)])
        with pytest.raises(ConfigError, match="failed its check"):
            choose("flash")
    with pytest.warns(UserWarning, match="_flash_attention_forward"):  # no kernel at all
        assert choose("auto").name == "gather"


@pytest.mark.parametrize("block_size", [1, 2, 16])
@pytest.mark.parametrize("shape", GROUPS, ids=str)
def test_the_check_at_start_is_valid_for_every_shape(monkeypatch, shape, block_size):
    monkeypatch.setattr(FlashAttention, "reason_against", staticmethod(lambda *_: None))
    with flash_stand_in():
        chosen = choose_attention("flash", config_of(*shape), block_size, torch.device("cpu"), torch.float32)
    assert chosen.name == "flash"


@pytest.mark.cuda
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("group", [1, 2, 4, 8])
def test_flash_equals_gather_on_cuda(group, head_dim):
    config = config_of(8, 8 // group, head_dim)
    for block_size in (16, 256):
        lens = (1, 255, 256, 257, 700, 3, 64, 1023)
        for dtype in (torch.bfloat16, torch.float16):
            scene = Scene(config, block_size, lens, dtype, "cuda")
            state = scene.generator.get_state()
            for run in (
                lambda a, s=scene: s.decode(a),
                lambda a, s=scene: s.prefill(a, (1, 255, 6, 100, 1, 3, 64, 23)),
            ):
                outputs = []
                for attention in (FlashAttention(config), GatherAttention()):
                    scene.generator.set_state(state)
                    outputs.append(run(attention))
                (flash, expected), (gather, _) = outputs
                assert relative_error(flash, gather) < TOLERANCE[dtype]
                assert relative_error(flash.cpu(), expected) < TOLERANCE[dtype]


@pytest.mark.cuda
def test_cuda_half_precision_gets_flash_and_float32_gather():
    config, device = config_of(8, 2, 64), torch.device("cuda")
    assert choose_attention("auto", config, 256, device, torch.bfloat16).name == "flash"
    assert choose_attention("auto", config, 256, device, torch.float32).name == "gather"
