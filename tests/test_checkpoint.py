"""Weights: exactly what is stored, in its place, within the memory of the weights; or one clear error."""

import json
import os
import subprocess
import sys

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
from safetensors.torch import load_file, save_file

from tinyengine.errors import CheckpointError
from tinyengine.model.checkpoint import destinations, load_params, random_params
from tinyengine.model.config import PRESETS, ModelConfig
from tinyengine.model.transformer import rope_table

transformers = pytest.importorskip("transformers")

FAMILIES = ["Llama", "Mistral", "Qwen2", "Qwen3"]
TINY = PRESETS["tiny"]


def saved(folder, family="Llama", shard="5GB", **options):
    """A tiny random model, its norms and biases random too, saved by transformers. Gives its state dict."""
    config = getattr(transformers, f"{family}Config")(
        vocab_size=120,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=64,
        **({"sliding_window": None} if family == "Mistral" else {}),
        **options,
    )
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_()
    model.save_pretrained(folder, max_shard_size=shard)
    return model.state_dict()


def load(folder, dtype=torch.float32, config=None):
    return load_params(folder, config or ModelConfig.from_folder(folder), "cpu", dtype, max_len=64)


def rewrite(folder, change):
    """Change the tensors of a single-file checkpoint."""
    path = folder / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    change(tensors)
    save_file(tensors, path)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("shard", ["5GB", "20KB"])
def test_every_stored_value_is_in_its_place(tmp_path, family, tied, shard):
    stored = saved(tmp_path, family, shard, tie_word_embeddings=tied)
    assert (tmp_path / "model.safetensors.index.json").exists() == (shard == "20KB")
    params = load(tmp_path)
    assert torch.equal(params.embed, stored["model.embed_tokens.weight"])
    assert torch.equal(params.lm_head, stored["lm_head.weight"])
    assert (params.lm_head is params.embed) == tied
    assert torch.equal(params.final_norm, stored["model.norm.weight"])
    for i, layer in enumerate(params.layers):
        of = {n.removeprefix(f"model.layers.{i}."): t for n, t in stored.items()}
        qkv = [of[f"self_attn.{x}_proj.weight"] for x in "qkv"]
        assert torch.equal(layer.qkv.t(), torch.cat(qkv))
        assert torch.equal(layer.gate_up.t(), torch.cat([of["mlp.gate_proj.weight"], of["mlp.up_proj.weight"]]))
        assert torch.equal(layer.down.t(), of["mlp.down_proj.weight"])
        assert torch.equal(layer.o_proj.t(), of["self_attn.o_proj.weight"])
        assert torch.equal(layer.attn_norm, of["input_layernorm.weight"])
        assert torch.equal(layer.mlp_norm, of["post_attention_layernorm.weight"])
        assert (layer.qkv_bias is not None) == (family == "Qwen2")
        assert (layer.qk_norm is not None) == (family == "Qwen3")
        if layer.qkv_bias is not None:
            assert torch.equal(layer.qkv_bias, torch.cat([of[f"self_attn.{x}_proj.bias"] for x in "qkv"]))
        if layer.qk_norm is not None:
            q, k = of["self_attn.q_norm.weight"], of["self_attn.k_norm.weight"]
            assert torch.equal(layer.qk_norm, torch.stack([q] * 4 + [k] * 2))


@pytest.mark.parametrize(("stored", "wanted"), [("bfloat16", "float32"), ("float32", "bfloat16")])
def test_weights_are_converted_to_the_dtype_asked_for(tmp_path, stored, wanted):
    saved(tmp_path)
    rewrite(tmp_path, lambda t: t.update({n: v.to(getattr(torch, stored)) for n, v in t.items()}))
    want = getattr(torch, wanted)
    params = load(tmp_path, want)
    assert params.dtype == want
    for name, tensor in load_file(tmp_path / "model.safetensors").items():
        assert torch.equal(destinations(params)[name], tensor.to(want))
    assert torch.equal(params.rope, rope_table(params.config, 64, torch.device("cpu"), want))


def test_rotary_leftovers_and_a_stored_head_that_is_the_embedding_are_accepted(tmp_path):
    saved(tmp_path, tie_word_embeddings=True)

    def add(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)

    rewrite(tmp_path, add)
    params = load(tmp_path, torch.bfloat16)
    assert params.lm_head is params.embed


def test_weights_loaded_in_inference_mode_can_be_updated_outside_it(tmp_path):
    saved(tmp_path)
    with torch.inference_mode():
        params = load(tmp_path)
    assert not any(t.is_inference() for t in weights(params))


def _pop(name):
    return lambda tensors: tensors.pop(name)


def _set(name, tensor):
    return lambda tensors: tensors.__setitem__(name, tensor)


UP = "model.layers.1.mlp.up_proj.weight"
BAD_TENSORS = {
    "missing": (_pop(UP), ["lacks", UP]),
    "no head": (_pop("lm_head.weight"), ["lm_head.weight", "tie_word_embeddings"]),
    "unexpected": (_set("model.layers.2.extra", torch.ones(1)), ["model.layers.2.extra", "no use"]),
    "another layer": (_set("model.layers.2.mlp.up_proj.weight", torch.ones(48, 32)), ["model.layers.2.mlp"]),
    "misshaped": (_set(UP, torch.ones(32, 48)), [UP, "[32, 48]", "[48, 32]"]),
    "flat": (_set("model.norm.weight", torch.ones(1)), ["model.norm.weight", "[1]", "[32]"]),
    "int8": (_set(UP, torch.ones(48, 32, dtype=torch.int8)), [UP, "I8", "quantised"]),
    "float8": (_set(UP, torch.ones(48, 32).to(torch.float8_e4m3fn)), [UP, "F8_E4M3", "quantised"]),
}


@pytest.mark.parametrize("case", BAD_TENSORS)
def test_a_bad_tensor_is_named(tmp_path, case):
    change, words = BAD_TENSORS[case]
    saved(tmp_path)
    rewrite(tmp_path, change)
    with pytest.raises(CheckpointError) as error:
        load(tmp_path)
    for word in [str(tmp_path), *words]:
        assert word in str(error.value)


@pytest.mark.parametrize("head", [torch.ones(120, 32), torch.ones(3, 32)])
def test_a_head_said_to_be_tied_that_differs_is_refused(tmp_path, head):
    saved(tmp_path, tie_word_embeddings=True)
    rewrite(tmp_path, _set("lm_head.weight", head))
    with pytest.raises(CheckpointError, match=r"lm_head\.weight differs"):
        load(tmp_path)


@pytest.mark.parametrize("keep", [0, 4, 200, -1])
def test_a_file_cut_short_is_named(tmp_path, keep):
    saved(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read"):
        load(tmp_path)


def test_a_missing_shard_is_named(tmp_path):
    saved(tmp_path, shard="20KB")
    config = ModelConfig.from_folder(tmp_path)
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(CheckpointError, match=shard.name):
        load(tmp_path, config=config)


@pytest.mark.parametrize("index", ["{", "[]", "{}", '{"weight_map": {"a": 1}}', '{"weight_map": {"a": "../b"}}'])
def test_a_bad_index_is_named(tmp_path, index):
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(CheckpointError, match=r"model\.safetensors\.index\.json"):
        load(tmp_path, config=TINY)


def test_a_tensor_in_two_shards_is_named(tmp_path):
    for name in "ab":
        save_file({"model.norm.weight": torch.ones(64)}, tmp_path / name)
    index = {"weight_map": {"model.norm.weight": "a", "model.other": "b"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight is stored twice"):
        load(tmp_path, config=TINY)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("pytorch_model.bin", ["pickle", "save_pretrained"]),
        ("model.Q4_1.gguf", ["gguf_file", "save_pretrained"]),
        ("readme.md", ["download"]),
    ],
)
def test_a_folder_without_safetensors_says_how_to_get_there(tmp_path, name, words):
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(CheckpointError) as error:
        load(tmp_path, config=TINY)
    for word in ["model.safetensors", *words]:
        assert word in str(error.value)
    with pytest.raises(CheckpointError, match="no folder"):
        load(tmp_path / "absent", config=TINY)


def weights(params):
    return list(destinations(params).values())


def test_random_weights_have_a_seed_and_a_sensible_scale():
    one, same, other = (random_params(TINY, "cpu", torch.float32, 16, seed) for seed in (0, 0, 1))
    assert all(torch.equal(a, b) for a, b in zip(weights(one), weights(same), strict=True))
    assert not torch.equal(one.embed, other.embed)
    assert one.layers[0].gate_up.std().item() == pytest.approx(0.02, rel=0.1)
    assert torch.equal(one.final_norm, torch.ones(64))
    assert one.rope.shape == (16, 2, 2, 8)


def test_random_weights_need_no_memory_on_meta():
    config = PRESETS["llama-3.2-1b"]
    params = random_params(config, "meta", torch.bfloat16, 16)
    assert params.device.type == params.rope.device.type == "meta"
    assert sum(t.numel() for t in weights(params)) == config.num_params


MEASURE = """
import sys, threading, torch
from tinyengine.model.checkpoint import load_params
from tinyengine.model.config import ModelConfig
from tinyengine.model.transformer import rope_table

def anonymous():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))

config, dtype = ModelConfig.from_folder(sys.argv[1]), getattr(torch, sys.argv[2])
rope_table(config, 16, torch.device("cpu"), dtype)  # torch's own first use
start = peak = anonymous()
done = threading.Event()

def watch():
    global peak
    while not done.wait(0.001):
        peak = max(peak, anonymous())

watcher = threading.Thread(target=watch)
watcher.start()
params = load_params(sys.argv[1], config, "cpu", dtype, 16)
peak = max(peak, anonymous())
done.set()
watcher.join()
print((peak - start) / (params.config.num_params * dtype.itemsize))
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="reads /proc")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_load_takes_the_memory_of_the_weights_and_no_more(tmp_path, dtype):
    """Some 56 MB of bf16, almost a third of it in one tensor, the embedding, whose copy would show."""
    keys = dict(vocab_size=16384, hidden_size=512, intermediate_size=1536, num_hidden_layers=6)
    keys.update(num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=64)
    data = dict(keys, architectures=["LlamaForCausalLM"], tie_word_embeddings=True, dtype="bfloat16")
    (tmp_path / "config.json").write_text(json.dumps(data))
    params = random_params(ModelConfig.from_folder(tmp_path), "cpu", torch.bfloat16, 16)
    stored = {name: place.contiguous() for name, place in destinations(params).items()}
    save_file(stored, tmp_path / "model.safetensors")
    del stored
    del params
    command = [sys.executable, "-c", MEASURE, str(tmp_path), dtype]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    ratio = float(done.stdout)
    assert 0.9 < ratio < 1.3, f"peak of anonymous memory is {ratio:.2f} times the weights"
