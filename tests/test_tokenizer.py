"""Text to ids and back as transformers does it; streaming that loses nothing and shows no half character."""

import json
import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import tokenizers
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from tinyengine.errors import ConfigError, RequestError
from tinyengine.model.detokenizer import Detokenizer, StopStrings
from tinyengine.model.tokenizer import ByteTokenizer, Tokenizer

TEXT = [
    "The quick brown fox jumps over the lazy dog. It's  two  spaces, and\n\n\ttabs; 12345.",
    "Größe, naïve café, e\u0301 and a\u030a, नमस्ते दुनिया, مرحبا بالعالم, ภาษาไทย",
    "日本語のテキスト、こんにちは世界。你好，世界！한국어 텍스트",
    "😀 😃 👩‍👩‍👧 🇩🇪 🏳️‍🌈 1️⃣",
]
TEMPLATE = """{%- if messages[0].role == 'system' %}
    {{- bos_token + messages[0].content }}
{% endif %}
{% for message in messages if message.role != 'system' %}
    {%- if message.role == 'robot' %}{{ raise_exception('no role ' + message.role) }}{% endif %}
    {%- if loop.index > 8 %}{% break %}{% endif %}
<|{{ message.role }}|>{% generation %}{{ message.content | trim }}{% endgeneration %}
{{ message | tojson }}{{ eos_token }}
{% endfor %}
{%- if tools is not none %}tools{% endif %}{% if add_generation_prompt %}<|assistant|>{% endif %}"""
CHAT = [
    {"role": "system", "content": 'Be <brief> & "kind".'},
    {"role": "user", "content": "  Grüße 😀 "},
    {"role": "assistant", "content": "Hello"},
]


def byte_level():
    """A GPT-2 style BPE, trained here; few merges, so that most characters are several tokens."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|begin|>", "<|end|>", "<|user|>", "<|assistant|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=330, initial_alphabet=alphabet, special_tokens=special, show_progress=False
    )
    backend.train_from_iterator(TEXT, trainer)
    begin = [("<|begin|>", backend.token_to_id("<|begin|>"))]
    backend.post_processor = processors.TemplateProcessing(single="<|begin|> $A", special_tokens=begin)
    return backend


def byte_fallback():
    """A Llama 2 style BPE: spaces are ▁, one stands before the text, unknown characters are byte tokens."""
    vocab = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁abehlot日é,"]
    pairs = [("▁", "t"), ("h", "e"), ("▁t", "he"), ("l", "l"), ("▁", "▁")]
    vocab += [a + b for a, b in pairs]
    backend = tokenizers.Tokenizer(
        models.BPE({t: i for i, t in enumerate(vocab)}, pairs, unk_token="<unk>", byte_fallback=True)
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(parts)
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return backend


def metaspace():
    """A SentencePiece style unigram model with the Metaspace decoder, trained here."""
    backend = tokenizers.Tokenizer(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=200, special_tokens=["<unk>"], unk_token="<unk>", show_progress=False)
    backend.train_from_iterator(TEXT, trainer)
    return backend


BACKENDS = {f.__name__: f() for f in (byte_level, byte_fallback, metaspace)}
TOKENIZERS = {"bytes": ByteTokenizer(), **{name: Tokenizer(backend) for name, backend in BACKENDS.items()}}
NAMES = sorted(TOKENIZERS)


def write(folder, backend=BACKENDS["byte_level"], **config):
    backend.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def oracle(folder):
    transformers = pytest.importorskip("transformers")
    return transformers.PreTrainedTokenizerFast.from_pretrained(folder)


# Against transformers


@pytest.mark.parametrize("name", sorted(BACKENDS))
@pytest.mark.parametrize("text", [*TEXT, "", " ", "  leading", "<|end|> in <s> text", "\ufffd\x00"])
def test_encode_and_decode_as_transformers_does(tmp_path, name, text):
    write(tmp_path, BACKENDS[name], clean_up_tokenization_spaces=False)
    ours, theirs = Tokenizer.from_folder(tmp_path), oracle(tmp_path)
    assert ours.vocab_size == len(theirs)
    for special in (True, False):
        ids = ours.encode(text, add_special_tokens=special)
        assert ids == theirs.encode(text, add_special_tokens=special)
        for skip in (True, False):
            assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("prompt", [True, False])
@pytest.mark.parametrize("form", ["string", "list", "file"])
def test_chat_template_renders_as_in_transformers(tmp_path, form, prompt):
    named = [{"name": "other", "template": "other"}, {"name": "default", "template": TEMPLATE}]
    stored = {"string": TEMPLATE, "list": named, "file": "overridden by the file"}[form]
    eos = {"content": "<|end|>", "__type": "AddedToken", "special": True}
    write(tmp_path, bos_token="<|begin|>", eos_token=eos, chat_template=stored)
    if form == "file":
        (tmp_path / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    ours, theirs = Tokenizer.from_folder(tmp_path), oracle(tmp_path)
    text = ours.apply_chat_template(CHAT, add_generation_prompt=prompt)
    assert text == theirs.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=prompt)
    assert text.startswith("<|begin|>Be <brief>")
    assert text.endswith("<|assistant|>") == prompt


def test_a_chat_is_encoded_with_the_special_tokens_of_the_template_alone(tmp_path):
    write(tmp_path, bos_token="<|begin|>", eos_token="<|end|>", chat_template=TEMPLATE)
    ours, theirs = Tokenizer.from_folder(tmp_path), oracle(tmp_path)
    ids = ours.encode_chat(CHAT)
    assert ids == theirs.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False)
    assert ids.count(ours.encode("")[0]) == 1


def test_the_config_is_optional_and_a_length_left_in_the_file_is_not_used(tmp_path):
    backend = byte_level()
    backend.enable_truncation(3)
    backend.enable_padding(length=50)
    backend.save(str(tmp_path / "tokenizer.json"))
    ours = Tokenizer.from_folder(tmp_path)
    assert ours.encode(TEXT[0]) == TOKENIZERS["byte_level"].encode(TEXT[0])


# Errors


def test_without_a_chat_template_a_chat_is_refused(tmp_path):
    for tokenizer in (Tokenizer.from_folder(write(tmp_path)), ByteTokenizer()):
        with pytest.raises(ConfigError, match="no chat template"):
            tokenizer.encode_chat(CHAT)


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (TEMPLATE, "no role robot"),
        ("{% for %}", "refused"),
        ("{{ 1 / 0 }}", "division"),
        ("{{ messages.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ absent.attribute }}", "undefined"),
    ],
)
def test_a_template_that_fails_is_one_clear_error(tmp_path, template, words):
    tokenizer = Tokenizer.from_folder(write(tmp_path, bos_token="", eos_token="", chat_template=template))
    with pytest.raises(RequestError, match=words):
        tokenizer.apply_chat_template([{"role": "robot", "content": "x"}])


@pytest.mark.parametrize("stored", [3, [], [{"name": "rag", "template": "x"}], [1], {"a": 1}])
def test_a_chat_template_of_a_wrong_kind_is_named(tmp_path, stored):
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json"):
        Tokenizer.from_folder(write(tmp_path, chat_template=stored))


def test_a_missing_or_damaged_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match="no folder"):
        Tokenizer.from_folder(tmp_path / "absent")
    with pytest.raises(ConfigError, match=r"tokenizer\.json is missing"):
        Tokenizer.from_folder(tmp_path)
    write(tmp_path)
    whole = (tmp_path / "tokenizer.json").read_text()
    for content in ("", "{}", "[]", whole[: len(whole) // 2]):
        (tmp_path / "tokenizer.json").write_text(content)
        with pytest.raises(ConfigError, match=r"tokenizer\.json is not a tokenizer"):
            Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text(whole)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize("name", NAMES)
def test_half_a_surrogate_pair_is_a_fault_of_the_request(name):
    with pytest.raises(RequestError, match="not valid Unicode"):
        TOKENIZERS[name].encode("a\ud83d")


# Bytes as tokens


def test_bytes_are_their_own_ids():
    tokenizer = ByteTokenizer()
    assert tokenizer.encode("é!") == [0xC3, 0xA9, 0x21]
    assert tokenizer.decode([0xC3, 0xA9, 300, 256, 0x21]) == "é!"
    assert tokenizer.decode([0xC3]) == "\ufffd"
    assert tokenizer.vocab_size == 256


# Streaming

PIECES = [
    "😀",
    "👩‍👩‍👧",
    "🇩🇪",
    "日",
    "本語",
    "é",
    "e\u0301",
    "नम",
    " ",
    "  ",
    "the",
    " the",
    "hello",
    "\n",
    "\ufffd",
    "ff",
    "▁",
]
texts = st.lists(st.one_of(st.sampled_from(PIECES), st.characters(codec="utf-8")), max_size=20).map("".join)


def stream(tokenizer, ids, sizes=(1,)):
    """The pieces that a Detokenizer gives for ids in groups of the sizes given, in turn; the flush is last."""
    detokenizer, pieces, at, turn = Detokenizer(tokenizer), [], 0, 0
    while at < len(ids):
        size = sizes[turn % len(sizes)]
        pieces.append(detokenizer.add(ids[at : at + size]))
        at, turn = at + size, turn + 1
    return [*pieces, detokenizer.flush()]


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=150, deadline=None)
@given(texts, st.lists(st.integers(1, 5), min_size=1, max_size=4))
@example("  two spaces first", [1])
@example("😀" * 20, [1])
@example("ü\ufffdहह€\ufffd€", [1])  # a long run of byte tokens with U+FFFD itself in it
def test_streamed_pieces_of_a_text_are_its_decoding(name, text, sizes):
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode(text)
    pieces = stream(tokenizer, ids, sizes)
    assert "".join(pieces) == tokenizer.decode(ids)
    if "\ufffd" not in text and name != "metaspace":
        assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=150, deadline=None)
@given(st.text(alphabet="the boat, é日😀", min_size=2, max_size=30), st.data())
def test_pieces_after_a_prompt_are_what_they_add_to_it(name, text, data):
    """A Llama 2 decoder strips the first space of what it is given: a continuation must keep its own."""
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode(text)
    cut = data.draw(st.integers(0, len(ids)))
    prompt = tokenizer.decode(ids[:cut])
    assume(not prompt.endswith("\ufffd") and tokenizer.decode(ids).startswith(prompt))
    detokenizer = Detokenizer(tokenizer, ids[:cut])
    assert prompt + detokenizer.add(ids[cut:]) + detokenizer.flush() == tokenizer.decode(ids)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=250, deadline=None)
@given(st.data())
def test_streamed_pieces_of_any_ids_are_their_decoding(name, data):
    """Broken characters, special tokens and ids outside the vocabulary too, as a random model gives them."""
    tokenizer = TOKENIZERS[name]
    odd = [0, 1, 2, tokenizer.vocab_size, tokenizer.vocab_size + 7]
    begun = tokenizer.encode("😀é日")  # its bytes, to be cut anywhere
    token = st.one_of(st.integers(0, tokenizer.vocab_size - 1), st.sampled_from(odd), st.sampled_from(begun))
    runs = st.lists(token, max_size=12)  # runs of byte tokens stay short of the longest that is held
    ids = data.draw(runs)
    assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from([0xF0, 0x9F, 0x98, 0x80, 0xC3, 0xA9, 0xED, 0xA0, 0xFF, 0x41, 300]), max_size=60))
def test_streamed_bytes_however_broken_are_their_decoding(ids):
    assert "".join(stream(ByteTokenizer(), ids)) == ByteTokenizer().decode(ids)


@pytest.mark.parametrize("name", ["bytes", "byte_level"])
def test_a_character_is_shown_with_its_last_byte(name):
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode("a😀b", add_special_tokens=False)
    pieces = stream(tokenizer, ids)
    assert [piece for piece in pieces if piece] == ["a", "😀", "b"]


def test_a_run_of_byte_tokens_is_shown_when_it_ends():
    tokenizer = TOKENIZERS["byte_fallback"]
    assert stream(tokenizer, tokenizer.encode("a😀b"))[-2:] == ["😀b", ""]


@pytest.mark.parametrize("name", ["bytes", "byte_fallback"])
def test_wrong_bytes_are_not_held_for_ever(name):
    tokenizer = TOKENIZERS[name]
    wrong = 0xFF if name == "bytes" else BACKENDS[name].token_to_id("<0xFF>")
    pieces = stream(tokenizer, [wrong] * 100)
    assert "".join(pieces) == "\ufffd" * 100
    assert len(pieces[-1]) <= 20
    follower = tokenizer.encode("b")[-1]
    assert stream(tokenizer, [wrong, follower])[1].startswith("\ufffd")


def test_a_long_run_of_byte_tokens_is_cut_between_characters():
    tokenizer = TOKENIZERS["byte_fallback"]
    pieces = stream(tokenizer, tokenizer.encode("€" * 40))
    assert "".join(pieces) == "€" * 40
    assert len(pieces[-1]) < 20


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["text", "special", "wrong"])
def test_a_token_costs_the_same_however_long_the_stream(name, kind):
    class Counting:
        longest = 0

        def __getattr__(self, attribute):
            return getattr(TOKENIZERS[name], attribute)

        def decode(self, ids):
            self.longest = max(self.longest, len(ids))
            return TOKENIZERS[name].decode(ids)

    tokenizer = Counting()
    unit = {"text": tokenizer.encode("the 日 😀é"), "special": [1 if name != "bytes" else 999]}
    unit["wrong"] = tokenizer.encode("😀")[-2:-1]
    stream(tokenizer, unit[kind] * 300)
    assert tokenizer.longest <= 25


# Stop strings

stop_lists = st.lists(st.text("ab", min_size=1, max_size=4), max_size=3)


def searched(text, stops):
    """The text before the stop string that is complete first, by a plain search; and whether there is one."""
    ends = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    return (text[: min(ends)[1]], True) if ends else (text, False)


@settings(max_examples=400, deadline=None)
@given(st.lists(st.text("abc", max_size=4), max_size=12), stop_lists)
def test_stop_strings_cut_as_a_plain_search_does_whatever_the_pieces(pieces, stops):
    filter_, shown, stopped = StopStrings(stops), "", False
    seen = ""
    for piece in pieces:
        text, stopped = filter_.push(piece)
        shown, seen = shown + text, seen + piece
        if stopped:
            assert (shown, True) == searched(seen, stops)
        if not stopped:  # what is held back could still become a stop string, and nothing longer is held
            held = seen[len(shown) :]
            assert held == max((seen[i:] for i in range(len(seen) + 1) if begins(seen[i:], stops)), key=len)
    assert (shown + filter_.flush(), stopped) == searched("".join(pieces), stops)
    assert filter_.stopped == stopped


def begins(text, stops):
    return text == "" or any(stop.startswith(text) for stop in stops)


def test_a_stop_string_is_found_across_pieces_and_nothing_comes_after_it():
    stops = StopStrings(["</s>", "\n\n"])
    assert stops.push("Hi <") == ("Hi ", False)
    assert stops.push("/") == ("", False)
    assert stops.push("b>\n") == ("</b>", False)
    assert stops.push("\nmore") == ("", True)
    assert stops.push("more") == ("", True)
    assert stops.flush() == ""


def test_an_empty_stop_string_is_refused():
    with pytest.raises(RequestError, match="empty"):
        StopStrings(["a", ""])
