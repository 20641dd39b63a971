"""The benchmarks run, tell no impossible figure, and refuse what they cannot time."""

import json
from dataclasses import replace

import pytest
import torch

from tinyengine import bench
from tinyengine.bench import main, nano_vllm_workload
from tinyengine.model import config
from tinyengine.model.checkpoint import destinations, random_params
from tinyengine.model.config import PRESETS
from tinyengine.peers import continuous_batching, load_peer, shaped_peer


def test_the_table_and_its_data_agree(families, capsys):
    pytest.importorskip("transformers")
    folder = str(families["llama"][1])
    code = main(
        ["cpu", "--model", folder, "--batch", "1", "3", "--prompt-len", "5", "--new-tokens", "4", "--repeats", "1"]
    )
    *table, last = capsys.readouterr().out.splitlines()
    data = json.loads(last)
    assert code == 0 and [row["batch"] for row in data["rows"]] == [1, 3]
    for line, row in zip([x for x in table if x.startswith("| ") and "batch" not in x], data["rows"], strict=True):
        assert f"| {row['tinyengine_ms']:.2f} | {row['transformers_ms']:.2f} |" in line
        assert row["products_ms"] > 0


@pytest.mark.parametrize("args", [["--batch", "0"], ["--new-tokens", "1"], ["--repeats", "x"]], ids=" ".join)
@pytest.mark.parametrize("command", ["cpu", "decode"])
def test_nonsense_is_refused(command, args, capsys):
    assert main([command, *args]) == 2
    assert "must be a whole number" in capsys.readouterr().err


REFUSED = {
    "longer than the model": ("cpu", ["--prompt-len", "1000", "--new-tokens", "30"], "above the model's own 1024"),
    "no room for so many": ("cpu", ["--batch", "100000000"], "memory holds"),
    "nor to decode": ("decode", ["--batch", "100000000"], "memory holds"),
    "a prompt of one": ("decode", ["--context", "10", "--new-tokens", "9"], "--context must be at least 11"),
    "no prompt": ("decode", ["--context", "10"], "--context must be at least 66"),
    "no model for the workload": ("throughput", [], "required: --model"),
    "a model too short for it": ("throughput", ["--model", "stories-7m"], "above the model's own 1024"),
}


@pytest.mark.parametrize(("command", "args", "complaint"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_timed_is_told_in_one_line(command, args, complaint, capsys):
    assert main([command, *args]) == 2
    error = capsys.readouterr().err
    assert complaint in error and len(error.splitlines()) == 1


@pytest.mark.parametrize("model", ["no-such-model", "/dev/null"])
@pytest.mark.parametrize("command", ["cpu", "decode", "throughput"])
def test_a_model_that_is_not_there_is_told_in_one_line(command, model, capsys):
    assert main([command, "--model", model]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_decode_tells_where_its_figures_come_from(capsys, tmp_path):
    path = tmp_path / "decode.json"
    args = ["--model", "tiny", "--batch", "1", "3", "--context", "40", "--new-tokens", "8", "--repeats", "1"]
    assert main(["decode", *args, "--json", str(path)]) == 0
    data = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert data == json.loads(path.read_text()) and [row["batch"] for row in data["rows"]] == [1, 3]
    for row in data["rows"]:
        assert row["context"] == 40 and row["device"] and row["date"] and row["torch"] == torch.__version__
        assert 0 < row["floor_ms"] < row["tpot_ms"] and 0 < row["share_of_floor"] < 1
        assert row["host_ms"] <= row["tpot_ms"] and row["ttft_ms"] > 0
        assert row["decode_tokens_per_second"] == pytest.approx(1000 * row["batch"] / row["tpot_ms"], rel=0.01)
        tiny = PRESETS["tiny"]
        assert row["weights_bytes"] >= 4 * tiny.num_params and row["cache_bytes"] > 0


def test_the_workload_is_nano_vllms():
    prompts, params = nano_vllm_workload(256)
    assert sum(p.max_tokens for p in params) == 133_966 and sum(map(len, prompts)) == 142_827
    assert {len(p) for p in prompts} <= set(range(100, 1025)) and all(p.ignore_eos for p in params)
    assert max(map(max, prompts)) <= 10_000 and {p.temperature for p in params} == {0.6}


@pytest.fixture
def long_tiny(monkeypatch):
    """The preset `tiny` with room for the workload's longest request."""
    monkeypatch.setitem(config.PRESETS, "tiny", replace(PRESETS["tiny"], max_position=2048))


def test_throughput_serves_every_token(long_tiny, capsys):
    assert main(["throughput", "--model", "tiny", "--requests", "3"]) == 0
    data = json.loads(capsys.readouterr().out.splitlines()[-1])
    prompts, params = nano_vllm_workload(3)
    assert data["output_tokens"] == sum(p.max_tokens for p in params)
    assert data["prompt_tokens"] == sum(map(len, prompts)) and data["requests"] == 3
    assert data["output_tokens_per_second"] == pytest.approx(data["output_tokens"] / data["seconds"])
    assert data["decode_steps"] == max(p.max_tokens for p in params) - 1
    assert 0 < data["floor_seconds"] < data["seconds"]


# ---- peers ----


@pytest.mark.parametrize("name", ["tiny", "qwen3-0.6b", "llama-3.2-1b"])
def test_a_presets_peer_has_its_shape(name):
    pytest.importorskip("transformers")
    ours = PRESETS[name]
    small = replace(ours, num_layers=1, vocab_size=500)
    peer = shaped_peer(small, torch.device("meta"), torch.bfloat16)
    theirs = {key: value.shape for key, value in peer.state_dict().items() if "rotary" not in key}
    mine = destinations(random_params(small, "meta", torch.bfloat16, 1))
    for key, place in mine.items():
        assert theirs[key] == (place.shape if "norm" not in key else place.shape[-1:]), key
    assert theirs.keys() - mine.keys() <= {"lm_head.weight"}


@pytest.mark.parametrize("context", ["5", "40"])
def test_decode_beside_its_peers(capsys, context):
    pytest.importorskip("transformers")
    args = ["--model", "tiny", "--batch", "2", "--context", context, "--new-tokens", "3", "--repeats", "1", "--peers"]
    assert main(["decode", *args]) == 0
    (row,) = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert all(row[f"peer_{name}_ms"] > 0 for name in ("compiled", "static", "dynamic"))


def test_continuous_batching_serves_every_token():
    pytest.importorskip("transformers", minversion="5.0")
    peer = load_peer("tiny", torch.device("cpu"), torch.float32, "paged|sdpa")
    took, tokens = continuous_batching(peer, [[5, 6, 7 + i] for i in range(5)], [3, 4, 5, 6, 7], 0.6, False)
    assert tokens == 25 and took > 0


def test_throughput_beside_its_peers(long_tiny, capsys, monkeypatch):
    pytest.importorskip("transformers")
    monkeypatch.setattr(bench, "load_peer", lambda *_: None)
    monkeypatch.setattr(bench, "continuous_batching", lambda *args: (2.0, 10 + 10 * args[-1]))
    assert main(["throughput", "--model", "tiny", "--requests", "1", "--peers"]) == 0
    *table, last = capsys.readouterr().out.splitlines()
    data = json.loads(last)
    assert (data["peer_tokens_per_second"], data["peer_graphs_tokens_per_second"]) == (5, 10)
    assert data["transformers"] and ["preemptions", "0"] in [line.split() for line in table]
