"""ModelConfig: what transformers says of a config.json, in both spellings, or a refusal by name."""

import json
import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch

from tinyengine.errors import ConfigError
from tinyengine.model.config import PRESETS, ModelConfig, RopeConfig
from tinyengine.model.transformer import rope_frequencies

transformers = pytest.importorskip("transformers")

SIZES = dict(
    vocab_size=300,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=3,
    num_attention_heads=4,
    max_position_embeddings=512,
)
LLAMA3 = dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)
FAMILIES = ["Llama", "Mistral", "Qwen2", "Qwen3"]


def folder_with(path, family="Llama", generation=None, **keys):
    """A folder with a config.json; a key given as `...` is left out."""
    data = {"architectures": [f"{family}ForCausalLM"], "model_type": family.lower(), **SIZES}
    data.update({"num_key_value_heads": 2, "sliding_window": None, **keys})
    data = {key: value for key, value in data.items() if value is not ...}
    (path / "config.json").write_text(json.dumps(data))
    if generation is not None:
        (path / "generation_config.json").write_text(json.dumps(generation))
    return path


def read(*args, **keys):
    return ModelConfig.from_folder(folder_with(*args, **keys))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "options",
    [
        dict(num_key_value_heads=2),
        dict(num_key_value_heads=2, head_dim=32, tie_word_embeddings=True, rms_norm_eps=1e-5),
    ],
)
def test_a_saved_config_reads_as_transformers_reads_it(tmp_path, family, options):
    extra = {"sliding_window": None} if family == "Mistral" else {}
    config_class = getattr(transformers, f"{family}Config")
    config_class(**SIZES, **options, **extra, architectures=[f"{family}ForCausalLM"]).save_pretrained(tmp_path)
    ours, theirs = ModelConfig.from_folder(tmp_path), transformers.AutoConfig.from_pretrained(tmp_path)
    for mine, key in dict(num_layers="num_hidden_layers", num_heads="num_attention_heads").items():
        assert getattr(ours, mine) == getattr(theirs, key)
    assert (ours.vocab_size, ours.hidden_size, ours.intermediate_size) == (300, 64, 96)
    assert ours.num_kv_heads == theirs.num_key_value_heads
    head_dim = getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads
    assert ours.head_dim == head_dim
    assert ours.max_position == theirs.max_position_embeddings
    assert ours.rms_norm_eps == theirs.rms_norm_eps
    assert ours.tie_embeddings == theirs.tie_word_embeddings
    assert ours.qkv_bias == (family == "Qwen2")
    assert ours.qk_norm == (family == "Qwen3")
    assert list(ours.eos_token_ids) == ([] if theirs.eos_token_id is None else [theirs.eos_token_id])
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(theirs)
    assert ours.num_params == model.num_parameters()


@pytest.mark.parametrize("family", FAMILIES)
def test_missing_keys_take_the_defaults_of_the_family(tmp_path, family):
    """Only the sizes are stored, with heads that suit every family's default number of KV heads."""
    missing = dict(num_key_value_heads=..., num_attention_heads=32, sliding_window=...)
    ours = read(tmp_path, family, **missing)
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    assert ours.num_kv_heads == theirs.num_key_value_heads
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or 2)
    assert ours.tie_embeddings is theirs.tie_word_embeddings is False
    assert ours.rms_norm_eps == theirs.rms_norm_eps == 1e-6
    assert ours.rope == RopeConfig(theta=10000.0)


def test_null_means_one_kv_head_a_head_and_hidden_over_heads(tmp_path):
    config = read(tmp_path, "Qwen2", num_key_value_heads=None, head_dim=None)
    assert (config.num_kv_heads, config.head_dim) == (4, 16)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", ["default", "linear", "llama3"])
@pytest.mark.parametrize("spelling", [4, "4, legacy type", 5])
def test_rope_turns_as_in_transformers_in_either_spelling(tmp_path, family, kind, spelling):
    scaling = {"default": {}, "linear": dict(factor=4.0), "llama3": LLAMA3}[kind]
    if spelling == 5:
        keys = dict(rope_parameters=dict(rope_type=kind, rope_theta=5e5, **scaling))
    else:
        name = "rope_type" if spelling == 4 else "type"
        keys = dict(rope_theta=5e5, rope_scaling={name: kind, **scaling} if scaling else None)
    ours = read(tmp_path, family, head_dim=32, **keys).rope
    assert (ours.theta, ours.kind) == (5e5, kind)
    if spelling == 5 and int(transformers.__version__.split(".")[0]) < 5:
        pytest.skip("transformers 4 does not read the spelling of 5")
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    rotary = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(theirs)
    torch.testing.assert_close(rope_frequencies(ours, 32), rotary.inv_freq.float(), rtol=1e-6, atol=0)


def test_llama3_rope_was_trained_to_max_position_where_the_file_does_not_say(tmp_path):
    scaling = {key: LLAMA3[key] for key in ("factor", "low_freq_factor", "high_freq_factor")}
    config = read(tmp_path, rope_scaling=dict(rope_type="llama3", **scaling))
    assert config.rope.original_max_position == 512


def test_rope_of_full_attention_is_taken_where_each_kind_of_layer_has_its_own(tmp_path):
    rope = {"full_attention": dict(rope_type="linear", rope_theta=7.0, factor=2.0)}
    assert read(tmp_path, "Qwen3", rope_parameters=rope).rope == RopeConfig(7.0, "linear", 2.0)


@pytest.mark.parametrize(
    ("keys", "dtype"),
    [
        (dict(torch_dtype="bfloat16"), "bfloat16"),
        (dict(dtype="float16"), "float16"),
        (dict(dtype="torch.float32"), "float32"),
        ({}, "float32"),
    ],
)
def test_dtype_in_either_spelling(tmp_path, keys, dtype):
    assert read(tmp_path, **keys).dtype == dtype


@pytest.mark.parametrize(
    ("generation", "own", "ids"),
    [
        (dict(eos_token_id=[5, 6, 7]), 9, (5, 6, 7)),
        (dict(eos_token_id=5), [8, 9], (5,)),
        (dict(temperature=0.6), [8, 9], (8, 9)),
        (None, 9, (9,)),
        (None, ..., (2,)),  # LlamaConfig's own default
        (None, None, ()),
    ],
)
def test_every_end_of_sequence_id_is_known(tmp_path, generation, own, ids):
    assert read(tmp_path, generation=generation, eos_token_id=own).eos_token_ids == ids


@pytest.mark.parametrize(
    ("family", "keys"),
    [
        ("Mistral", dict(sliding_window=None)),
        ("Mistral", dict(sliding_window=512)),
        ("Qwen2", dict(sliding_window=64, use_sliding_window=False)),
        ("Qwen3", dict(sliding_window=64)),
        ("Qwen2", dict(sliding_window=64, use_sliding_window=True, max_window_layers=3)),
        ("Qwen3", dict(sliding_window=64, use_sliding_window=True, layer_types=["full_attention"] * 3)),
        ("Qwen3", dict(sliding_window=512, use_sliding_window=True, max_window_layers=0)),
        ("Llama", dict(sliding_window=64)),  # Llama has none, in transformers too
    ],
)
def test_a_sliding_window_that_changes_nothing_is_no_matter(tmp_path, family, keys):
    assert read(tmp_path, family, **keys).max_position == 512


REFUSED = {
    "architecture": (
        "Llama",
        dict(architectures=["GemmaForCausalLM"]),
        ["GemmaForCausalLM", "Qwen3ForCausalLM"],
    ),
    "classifier": (
        "Llama",
        dict(architectures=["LlamaForSequenceClassification"]),
        ["SequenceClassification"],
    ),
    "no architecture": ("Llama", dict(architectures=..., model_type="mamba"), ["mamba", "LlamaForCausalLM"]),
    "yarn": ("Qwen3", dict(rope_scaling=dict(rope_type="yarn", factor=4.0)), ["yarn", "llama3"]),
    "dynamic": ("Llama", dict(rope_scaling=dict(type="dynamic", factor=2.0)), ["dynamic"]),
    "longrope": ("Llama", dict(rope_parameters=dict(rope_type="longrope")), ["longrope"]),
    "mistral window": ("Mistral", dict(sliding_window=511), ["sliding_window", "511", "512"]),
    "mistral default window": ("Mistral", dict(sliding_window=..., max_position_embeddings=8192), ["4096"]),
    "qwen window": ("Qwen2", dict(sliding_window=64, use_sliding_window=True, max_window_layers=1), ["64"]),
    "layer types": (
        "Qwen3",
        dict(sliding_window=64, layer_types=["sliding_attention"] * 3),
        ["sliding_window"],
    ),
    "linear attention": (
        "Qwen3",
        dict(layer_types=["linear_attention"] * 3),
        ["layer_types", "linear_attention"],
    ),
    "quantised": (
        "Llama",
        dict(quantization_config=dict(quant_method="awq", bits=4)),
        ["quantization_config", "awq"],
    ),
    "llama bias": ("Llama", dict(attention_bias=True), ["attention_bias", "llama"]),
    "qwen3 bias": ("Qwen3", dict(attention_bias=True), ["attention_bias", "qwen3"]),
    "mlp bias": ("Llama", dict(mlp_bias=True), ["mlp_bias"]),
    "activation": ("Llama", dict(hidden_act="gelu"), ["hidden_act", "gelu", "silu"]),
    "partial rotary": ("Llama", dict(partial_rotary_factor=0.5), ["partial_rotary_factor"]),
    "partial in rope": (
        "Llama",
        dict(rope_parameters=dict(partial_rotary_factor=0.5)),
        ["rope_parameters.partial"],
    ),
    "float8": ("Llama", dict(dtype="float8_e4m3fn"), ["float8_e4m3fn", "bfloat16"]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_implemented_is_refused_by_name(tmp_path, case):
    family, keys, words = REFUSED[case]
    with pytest.raises(ConfigError) as error:
        read(tmp_path, family, **keys)
    for word in [str(tmp_path / "config.json"), *words]:
        assert word in str(error.value)


WRONG = {
    "missing": (dict(hidden_size=...), "hidden_size is missing; it must be an integer"),
    "null": (dict(vocab_size=None), "vocab_size is missing"),
    "a string": (dict(hidden_size="64"), 'hidden_size is "64"; it must be an integer'),
    "a float": (dict(num_hidden_layers=2.5), "num_hidden_layers is 2.5"),
    "a boolean": (dict(num_hidden_layers=True), "num_hidden_layers is true"),
    "zero": (dict(num_hidden_layers=0), "num_hidden_layers in config.json) is 0; it must be positive"),
    "no heads": (dict(num_attention_heads=0), "num_attention_heads"),
    "negative": (dict(vocab_size=-5), "vocab_size is -5"),
    "endless": (dict(rms_norm_eps=float("inf")), "rms_norm_eps is out of range"),
    "not a number": (dict(rope_theta=float("nan")), "rope_theta is out of range"),
    "huge": (dict(rms_norm_eps=10**400), "rms_norm_eps is out of range"),
    "kv heads": (
        dict(num_key_value_heads=3),
        "num_attention_heads 4 is not a multiple of num_key_value_heads 3",
    ),
    "odd head": (dict(head_dim=15), "head_dim 15 is odd"),
    "no head": (dict(hidden_size=66), "num_attention_heads 4"),
    "theta": (dict(rope_theta="1e6"), "rope_theta"),
    "zero theta": (dict(rope_theta=0), "rope theta is 0"),
    "factor": (dict(rope_scaling=dict(rope_type="linear")), "rope_scaling.factor is missing"),
    "zero factor": (dict(rope_scaling=dict(rope_type="linear", factor=0)), "rope factor is 0"),
    "llama3": (dict(rope_scaling=dict(LLAMA3, rope_type="llama3", high_freq_factor=1.0)), "low_freq_factor"),
    "rope": (dict(rope_scaling=[1]), "rope_scaling is [1]; it must be an object"),
    "tied": (dict(tie_word_embeddings="yes"), "tie_word_embeddings"),
    "eos": (dict(eos_token_id=["</s>"]), "eos_token_id must be a token id"),
    "architectures": (dict(architectures="LlamaForCausalLM"), "architectures is"),
    "quantised": (dict(quantization_config="awq"), "quantization_config"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_value_is_named_with_its_file_and_key(tmp_path, case):
    keys, words = WRONG[case]
    with pytest.raises(ConfigError) as error:
        read(tmp_path, **keys)
    assert words in str(error.value)
    assert str(tmp_path / "config.json") in str(error.value)


@pytest.mark.parametrize("content", [b"{", b"[1]", b"\xff\xfe", b"", b"[" * 100_000, b"null"])
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_a_file_that_is_no_json_object_is_named(tmp_path, name, content):
    folder_with(tmp_path, generation={})
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=name):
        ModelConfig.from_folder(tmp_path)


def test_a_missing_folder_or_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match="no such folder"):
        ModelConfig.from_folder(tmp_path / "absent")
    with pytest.raises(ConfigError, match=r"config\.json is missing"):
        ModelConfig.from_folder(tmp_path)
    (tmp_path / "config.json").mkdir()
    with pytest.raises(ConfigError, match="cannot be read"):
        ModelConfig.from_folder(tmp_path)


def test_presets_have_the_published_sizes():
    assert PRESETS["qwen3-0.6b"].num_params == 596_049_920
    assert PRESETS["llama-3.2-1b"].num_params == 1_235_814_400
    assert PRESETS["llama-3.2-1b"].rope == RopeConfig(5e5, "llama3", 32.0, 1.0, 4.0, 8192)
    assert PRESETS["glm-4.5-air-vocab"].vocab_size == 151552
    assert PRESETS["tiny"].num_params < 300_000
