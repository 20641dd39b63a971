"""Measure a story model: held-out bits per byte, what is asked for and what comes, and how much is copied.

    python -m recipe.evaluate --model stories-7m               (from the folder weights/)

Held-out stories come from seeds that training never uses; held-out subjects are never asked for in training.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import re
import time
import zlib
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from .documents import document, held_out_subject
from .stories import Subject, story

RUN = 8
"""Words in a run that counts as copied."""

SAMPLES = [
    "The little dragon",
    "One rainy morning",
    "Lily was sad because",
    "Once upon a time",
    "Tell me a story about a red kite.",
    "Tell me a story about a brave little mouse.",
    "Tell me a story about a lost key.",
    "Tell me a story about two friends and a storm.",
    "Hello!",
    "Who are you?",
]
"""Prompts of the sample file, after the held-out requests: the first four are continued, the others are chats."""


# -- held-out text ----------------------------------------------------------------------------------------------------


@torch.inference_mode()
def bits_per_byte(model: Any, tokenizer: Any, count: int, device: str) -> tuple[float, int]:
    """Nats of the text tokens of held-out stories over their bytes and ln 2; also the number of bytes."""
    nats, size = 0.0, 0
    for number in range(count):
        text = story(f"held-out {number}")
        ids = torch.tensor([tokenizer(text)["input_ids"]], device=device)[:, :1024]
        size += len(tokenizer.decode(ids[0, 1:]).encode())
        logits = model(input_ids=ids).logits[0, :-1].float()
        nats += torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum").item()
    return nats / size / math.log(2), size


# -- generation -------------------------------------------------------------------------------------------------------


@torch.inference_mode()
def generate(
    model: Any, tokenizer: Any, prompts: list[list[int]], device: str, temperature: float = 0.8, limit: int = 640
) -> list[tuple[str, bool]]:
    """Sampled continuations of token lists as (text, ended by itself); padded on the left, one batch."""
    width = max(len(ids) for ids in prompts)
    pad = tokenizer.pad_token_id
    ids = torch.tensor([[pad] * (width - len(one)) + one for one in prompts], device=device)
    mask = torch.tensor([[0] * (width - len(one)) + [1] * len(one) for one in prompts], device=device)
    out = model.generate(
        input_ids=ids,
        attention_mask=mask,
        do_sample=True,
        temperature=temperature,
        top_k=0,
        top_p=1.0,
        max_new_tokens=limit,
    )
    texts = []
    for row in out[:, width:].tolist():
        ends = [at for at, token in enumerate(row) if token in (0, 3)]
        stop = ends[0] if ends else len(row)
        texts.append((tokenizer.decode(row[:stop]).strip(), bool(ends)))
    return texts


def chat_ids(tokenizer: Any, request: str) -> list[int]:
    """Token ids of a chat with one request, up to where the answer begins."""
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": request}], tokenize=False, add_generation_prompt=True
    )
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def held_out_requests(count: int) -> list[Subject]:
    """Different subjects that training never asks for."""
    rng = Random("held-out requests")
    found: dict[str, Subject] = {}
    while len(found) < count:
        subject = held_out_subject(rng)
        found[subject.key] = subject
    return list(found.values())


def mentions(text: str, subject: Subject) -> tuple[bool, bool]:
    """Whether a text names the noun, and all of the adjectives."""
    words = text.lower()
    return subject.noun in words, all(re.search(rf"\b{adjective}\b", words) for adjective in subject.adjectives)


# -- copies -----------------------------------------------------------------------------------------------------------


def words_of(text: str) -> list[str]:
    """Words without case and marks."""
    return re.findall(r"[a-z0-9']+", text.lower())


def run_hashes(words: list[str]) -> np.ndarray:
    """One 64-bit number for every run of RUN words."""
    if len(words) < RUN:
        return np.empty(0, np.uint64)
    ids = np.array([zlib.crc32(word.encode()) for word in words], np.uint64)
    total = np.zeros(len(ids) - RUN + 1, np.uint64)
    with np.errstate(over="ignore"):
        for at in range(RUN):
            total = total * np.uint64(0x9E3779B97F4A7C15) + ids[at : len(ids) - RUN + 1 + at]
    return total


def sentences_of(text: str) -> list[str]:
    """Sentences with at least five words, in lower case."""
    parts = re.split(r"(?<=[.!?])\"?\s+", text)
    return [" ".join(words) for part in parts if len(words := words_of(part)) >= 5]


def sentence_hashes(text: str) -> np.ndarray:
    """One number a sentence."""
    keys = [zlib.crc32(one.encode()) | (zlib.adler32(one.encode()) << 32) for one in sentences_of(text)]
    return np.array(keys, np.uint64)


def _hashes(span: tuple[int, int]) -> tuple[np.ndarray, np.ndarray, int]:
    runs, sentences, size = [], [], 0
    for number in range(*span):
        text = document(number)
        size += len(text.encode())
        for part in re.split(r"<\|\w+\|>", text):
            runs.append(run_hashes(words_of(part)))
            sentences.append(sentence_hashes(part))
    return np.unique(np.concatenate(runs)), np.unique(np.concatenate(sentences)), size


def training_hashes(documents: int, workers: int) -> tuple[np.ndarray, np.ndarray, int]:
    """All runs and sentences of the first training documents, sorted, and the bytes of that text."""
    spans = [(at, min(at + 1000, documents)) for at in range(0, documents, 1000)]
    with multiprocessing.get_context("fork").Pool(workers) as pool:
        parts = pool.map(_hashes, spans, chunksize=1)
    runs, sentences, sizes = zip(*parts, strict=True)
    return np.unique(np.concatenate(runs)), np.unique(np.concatenate(sentences)), sum(sizes)


def known_hashes(documents: int, workers: int, file: Path | None) -> tuple[np.ndarray, np.ndarray, int]:
    """The hashes from a file, if it is there; else made and kept there."""
    if file is not None and file.exists():
        with np.load(file) as found:
            return found["runs"], found["sentences"], int(found["size"])
    runs, sentences, size = training_hashes(documents, workers)
    if file is not None:
        new = file.with_suffix(".new.npz")
        np.savez(new, runs=runs, sentences=sentences, size=size)
        os.replace(new, file)
    return runs, sentences, size


def copied(texts: list[str], runs: np.ndarray, sentences: np.ndarray) -> tuple[float, float]:
    """Shares of 8-word runs and of sentences that the training text has, too."""
    own_runs = np.concatenate([run_hashes(words_of(text)) for text in texts])
    own_sentences = np.concatenate([sentence_hashes(text) for text in texts])
    return float(np.isin(own_runs, runs).mean()), float(np.isin(own_sentences, sentences).mean())


# -- all together -----------------------------------------------------------------------------------------------------


def evaluate(
    folder: Path, requests: int, held_out: int, documents: int, workers: int, hashes: Path | None, samples: Path | None
) -> dict[str, Any]:
    """All figures of the model card."""
    started = time.time()
    runs, sentences, size = known_hashes(documents, workers, hashes)  # before CUDA starts: the workers are forked
    hashed = time.time() - started
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16 if device == "cuda" else torch.float32)
        .to(device)
        .eval()
    )
    bits, held_bytes = bits_per_byte(model, tokenizer, held_out, device)
    subjects = held_out_requests(requests)
    asked = [f"Tell me a story about {subject.text}." for subject in subjects]
    prompts = [chat_ids(tokenizer, text) for text in asked]
    prompts += [
        tokenizer(text)["input_ids"] if at < 4 else chat_ids(tokenizer, text) for at, text in enumerate(SAMPLES)
    ]
    torch.manual_seed(20)
    answers = generate(model, tokenizer, prompts, device)
    told = answers[:requests]
    named = [(*mentions(text, subject), ended) for (text, ended), subject in zip(told, subjects, strict=True)]
    run_share, sentence_share = copied([text for text, _ in told], runs, sentences)
    fresh = [story(f"held-out {number}") for number in range(min(held_out, 200))]
    fresh_runs, fresh_sentences = copied(fresh, runs, sentences)
    if samples:
        write_samples(samples, asked + SAMPLES, answers, requests)
    return {
        "device": device,
        "held_out_stories": held_out,
        "held_out_bytes": held_bytes,
        "bits_per_byte": round(bits, 4),
        "requests": requests,
        **{
            f"first_20_{name}": sum(row[at] for row in named[:20])
            for at, name in enumerate(("noun", "adjective", "ended"))
        },
        "first_20_all": sum(row[0] and row[2] for row in named[:20]),
        "first_20_strict": sum(all(row) for row in named[:20]),
        **{
            f"share_{name}": round(sum(row[at] for row in named) / requests, 4)
            for at, name in enumerate(("noun", "adjective", "ended"))
        },
        "share_strict": round(sum(all(row) for row in named) / requests, 4),
        "words_mean": round(sum(len(text.split()) for text, _ in told) / requests, 1),
        "copy_text_bytes": size,
        "copy_runs_known": len(runs),
        "copied_runs": round(run_share, 4),
        "copied_sentences": round(sentence_share, 4),
        "copied_runs_of_fresh_grammar_text": round(fresh_runs, 4),
        "copied_sentences_of_fresh_grammar_text": round(fresh_sentences, 4),
        "seconds_hashing": round(hashed, 1),
        "seconds": round(time.time() - started, 1),
    }


def write_samples(path: Path, asked: list[str], answers: list[tuple[str, bool]], requests: int) -> None:
    """Twenty held-out requests and the fixed prompts, for reading."""
    chosen = list(range(min(20, requests))) + list(range(requests, len(answers)))
    lines = []
    for at in chosen:
        text, ended = answers[at]
        lines.append(f"### {asked[at]}{'' if ended else '  (did not end)'}\n\n{text}\n")
    path.write_text("\n".join(lines), encoding="utf-8")


def main(arguments: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Measure a story model.")
    parser.add_argument("--model", type=Path, help="folder of the model; without it only the hashes are made")
    parser.add_argument("--hashes", type=Path, help="file (.npz) that keeps the hashes of the training text")
    parser.add_argument("--requests", type=int, default=20)
    parser.add_argument("--held-out", type=int, default=300, help="stories for bits per byte")
    parser.add_argument(
        "--copy-documents",
        type=int,
        default=130_000,
        help="training documents to look for copies in (about 1.6 kB each)",
    )
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--samples", type=Path, help="write thirty texts here, for reading")
    args = parser.parse_args(arguments)
    if args.model is None:
        known_hashes(args.copy_documents, args.workers, args.hashes)
        return
    figures = evaluate(
        args.model, args.requests, args.held_out, args.copy_documents, args.workers, args.hashes, args.samples
    )
    for name, value in figures.items():
        print(f"{name:42} {value}")
    if args.json:
        args.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
