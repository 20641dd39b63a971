"""The story grammar and the recipe: what every story keeps to, and that all parts of a training run work."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest

WEIGHTS = Path(__file__).resolve().parents[1] / "weights"
MODEL = WEIGHTS / "stories-7m"
sys.path.insert(0, str(WEIGHTS))

from recipe import documents, lexicon, stories  # noqa: E402
from recipe.phrases import PHRASES  # noqa: E402
from recipe.template import article, check_slots, parse, tidy  # noqa: E402


@pytest.fixture(scope="module")
def sample() -> list[tuple[stories.Subject, str]]:
    """Three hundred stories with their subjects."""
    made = []
    for seed in range(300):
        rng = Random(f"sample {seed}")
        subject = stories.random_subject(rng)
        made.append((subject, stories.write_story(subject, rng)))
    return made


def test_a_story_depends_on_its_seed_alone() -> None:
    assert [stories.story(seed) for seed in range(5)] == [stories.story(seed) for seed in range(5)]
    assert len({stories.story(seed) for seed in range(40)}) == 40


def test_a_document_depends_on_its_number_alone() -> None:
    assert documents.document(7) == documents.document(7) != documents.document(8)


def test_stories_name_what_they_are_about(sample: list[tuple[stories.Subject, str]]) -> None:
    for subject, text in sample:
        if subject.kind not in ("theme", "pair", "idea"):
            assert subject.noun in text.lower(), subject
            assert all(re.search(rf"\b{word}\b", text.lower()) for word in subject.adjectives), subject


def test_stories_keep_to_their_length(sample: list[tuple[stories.Subject, str]]) -> None:
    counts = [len(text.split()) for _, text in sample]
    assert min(counts) >= 80 and max(counts) <= 330


def test_no_template_shows_through(sample: list[tuple[stories.Subject, str]]) -> None:
    for subject, text in sample:
        assert not re.search(r"[{}\[\]<>|\x01]|None|  |,,|,\.|'s's", text), (subject, text)
        assert text[-1] in '.!?"', text[-40:]
        assert text.count('"') % 2 == 0, text


def test_a_and_an_follow_the_sound(sample: list[tuple[stories.Subject, str]]) -> None:
    assert [article(word) for word in ("owl", "unicorn", "hour", "old", "one", "red", "useful", "island")] == [
        "an",
        "a",
        "an",
        "an",
        "a",
        "a",
        "a",
        "an",
    ]
    for _, text in sample:
        for found in re.finditer(r"\b(an?) ([a-z]+)", text):
            assert found[1] == article(found[2]), found[0]


def test_tidy_mends_marks_in_speech() -> None:
    assert tidy('"Was that you!" said Tom. a owl came.') == '"Was that you?" said Tom. An owl came.'
    assert tidy('"We are too small?" asked Tom.') == '"We are too small," said Tom.'


def test_every_plot_parses_and_names_known_phrases() -> None:
    plots = [plot for group in stories.all_plots().values() for plot in group]
    assert len(plots) >= 100
    for plot in plots:
        check_slots(parse(plot.text), PHRASES)
    for options in PHRASES.values():
        for option in options:
            check_slots(parse(option), PHRASES)


def test_every_thing_has_a_plot_for_each_of_its_adjectives() -> None:
    for noun, thing in lexicon.THINGS.items():
        fit = [word for word in lexicon.adjectives_for(thing) if stories._thing_plots(noun, (word,))]
        assert len(fit) > 15, noun


def test_requests_never_ask_for_held_out_subjects() -> None:
    rng = Random(0)
    held = {documents.held_out_subject(rng).key for _ in range(60)}
    asked = "\n".join(documents.document(seed).split(documents.ASSISTANT)[0] for seed in range(800)).lower()
    for key in held:
        phrase = f"{article(key)} {key}"
        assert not re.search(rf"about {re.escape(phrase)}(?! \w)", asked), phrase


def test_documents_begin_with_the_end_of_text_token() -> None:
    for seed in range(60):
        text = documents.document(seed)
        assert text.startswith(documents.END_OF_TEXT)
        assert text.count(documents.USER) == text.count(documents.ASSISTANT) == text.count(documents.END) / 2


TURNS = [("Tell me a story about a red kite.", "One story."), ("Another one, about a green boat.", "Two stories.")]
MESSAGES = [
    {"role": role, "content": text} for turn in TURNS for role, text in zip(("user", "assistant"), turn, strict=True)
]


@pytest.mark.parametrize("system", [[], [{"role": "system", "content": "Be brief."}]])
def test_the_jinja_template_gives_the_chat_format(system: list[dict[str, str]]) -> None:
    template = pytest.importorskip("jinja2").Template(documents.CHAT_TEMPLATE)
    assert template.render(messages=system + MESSAGES, add_generation_prompt=False) == documents.chat(TURNS)
    assert template.render(messages=MESSAGES[:1], add_generation_prompt=True) == (
        "<|endoftext|><|user|>\nTell me a story about a red kite.<|end|>\n<|assistant|>\n"
    )


def test_the_shipped_model_is_small_and_says_what_it_is() -> None:
    config = json.loads((MODEL / "config.json").read_text())
    assert (
        config["architectures"] == ["LlamaForCausalLM"]
        and config["vocab_size"] == 4096
        and config["tie_word_embeddings"]
    )
    assert json.loads((MODEL / "tokenizer_config.json").read_text())["chat_template"] == documents.CHAT_TEMPLATE
    assert json.loads((MODEL / "generation_config.json").read_text())["eos_token_id"] == [0, 3]
    assert sum(path.stat().st_size for path in MODEL.iterdir()) < 16 * 2**20


def test_the_shipped_tokenizer_puts_the_first_token_and_keeps_text() -> None:
    tokenizer = pytest.importorskip("tokenizers").Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == 4096
    assert [
        tokenizer.token_to_id(token) for token in ("<|endoftext|>", "<|user|>", "<|assistant|>", "<|end|>", "<|pad|>")
    ] == [0, 1, 2, 3, 4]
    text = 'Zoë said: "A 1st test, isn\'t it?"\n\n日本'
    ids = tokenizer.encode(text).ids
    assert ids[0] == 0 and tokenizer.decode(ids) == text


@pytest.mark.slow
def test_a_tiny_training_run_leaves_a_model_and_goes_on_after_a_break(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    out = tmp_path / "model"
    command = [sys.executable, "-m", "recipe.train", "--smoke", "--out", str(out), "--workers", "1"]
    steps = []
    for more in (["--max-steps", "2"], ["--max-steps", "5", "--resume"]):
        subprocess.run(command + more, cwd=WEIGHTS, check=True, timeout=120, capture_output=True)
        steps.append(json.loads((out / "train.json").read_text())["steps"])
    assert steps == [2, 5]
    assert "resumed at step 2" in (out / "train.log").read_text()
    names = {path.name for path in out.iterdir()}
    assert {
        "model.safetensors",
        "config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "generation_config.json",
        "train.json",
    } <= names
