"""What several test files share: tiny models of every family, saved by transformers, which is the oracle."""

import os

# The suite must pass on a machine with no network; transformers looks for one unless told not to.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Tiny models gain nothing from threads, and workers that share the cores lose much by them.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

pytest_plugins = ["exercises.plugin"]


def pytest_collection_modifyitems(items):
    """Skip the tests marked `cuda` where there is no device; they count as skipped, never as passed."""
    if not torch.cuda.is_available():
        for item in items:
            if "cuda" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


TINY = dict(
    vocab_size=300,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
    initializer_range=0.2,  # large enough that greedy choices are clear ones
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
)
ROPE_LLAMA3 = dict(
    rope_type="llama3",
    rope_theta=5e5,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=64,
)
BLOCK_BYTES = 3 * 16 * 2 * 2 * 16 * 4  # of family llama: layers, tokens, K and V, heads, head_dim, float32
FAMILIES = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {}),
    "llama3-tied": (
        "LlamaConfig",
        "LlamaForCausalLM",
        dict(tie_word_embeddings=True, rope=ROPE_LLAMA3, head_dim=32),
    ),
    "llama-linear": (
        "LlamaConfig",
        "LlamaForCausalLM",
        dict(rope=dict(rope_type="linear", rope_theta=1e4, factor=4.0)),
    ),
    "mistral": ("MistralConfig", "MistralForCausalLM", dict(sliding_window=None)),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", {}),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", dict(head_dim=32)),
}


def hf_model(family, **overrides):
    """A tiny random model of transformers in float32, its norms and biases random too."""
    transformers = pytest.importorskip("transformers")
    config_class, model_class, extra = FAMILIES[family]
    options = {**TINY, **extra, **overrides}
    rope = options.pop("rope", None)
    if rope is not None:  # transformers 5 has one spelling, transformers 4 another
        name = "rope_parameters" if int(transformers.__version__.split(".")[0]) >= 5 else "rope_scaling"
        options[name] = dict(rope)
        if name == "rope_scaling":
            options["rope_theta"] = options[name].pop("rope_theta")
    model = getattr(transformers, model_class)(getattr(transformers, config_class)(**options)).float().eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("bias"):
                weight.normal_(0, 0.5)
            elif "norm" in name:
                weight.uniform_(0.5, 1.5)
    return model


def byte_tokenizer_json():
    """A tokenizer.json whose ids 3 to 258 are bytes: any text goes in, any id comes out."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<pad>": 0, "<bos>": 1, "<eos>": 2, **{letter: 3 + i for i, letter in enumerate(alphabet)}}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<pad>", "<bos>", "<eos>"])
    return tokenizer.to_str()


@pytest.fixture(scope="session")
def families(tmp_path_factory):
    """For each family: the transformers model, and the folder it was saved in."""
    made = {}
    for family in FAMILIES:
        torch.manual_seed(1)
        folder = tmp_path_factory.mktemp(family)
        model = hf_model(family)
        model.save_pretrained(folder)
        (folder / "tokenizer.json").write_text(byte_tokenizer_json())
        made[family] = (model, folder)
    return made


def interrupted(monkeypatch, module, name):
    """Make every fifth call of a function end as if Ctrl-C had been pressed; the calls so far."""
    original, calls = getattr(module, name), []

    def sometimes(*args):
        calls.append(args)
        if len(calls) % 5 == 0:
            raise KeyboardInterrupt
        return original(*args)

    monkeypatch.setattr(module, name, sometimes)
    return calls
