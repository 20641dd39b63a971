"""Train the story model: make the text, the tokenizer and the token arrays, then AdamW in bf16 with a time budget.

python -m recipe.train --out stories-7m --minutes 4        (from the folder weights/)
python -m recipe.train --smoke --out /tmp/smoke            (under a minute on two CPU cores)
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM

from .documents import CHAT_TEMPLATE, document
from .stories import ASSISTANT, END, END_OF_TEXT, USER

PAD = "<|pad|>"
SPECIAL = [END_OF_TEXT, USER, ASSISTANT, END, PAD]
VOCABULARY = 4096


@dataclass(frozen=True)
class Budget:
    """Everything that decides what comes out; `minutes` counts training steps only, not text or compilation."""

    documents: int = 300_000
    tokenizer_documents: int = 24_000
    minutes: float = 4.0
    max_steps: int = 1_000_000
    batch: int = 128
    length: int = 1024
    learning_rate: float = 3e-3
    weight_decay: float = 0.1
    warm_up: float = 0.02
    seed: int = 1


SMOKE = Budget(documents=500, tokenizer_documents=1_500, minutes=0.2, max_steps=6, batch=4, length=64)


def say(log: Path, text: str) -> None:
    """Print a line and keep it."""
    line = f"{time.strftime('%H:%M:%S')} {text}"
    print(line, flush=True)
    with log.open("a", encoding="utf-8") as file:
        file.write(line + "\n")


# -- text and tokens ------------------------------------------------------------------------------------------------


def _texts(span: tuple[int, int]) -> list[str]:
    return [document(number) for number in range(*span)]


def spans(first: int, last: int, size: int = 500) -> list[tuple[int, int]]:
    """The range cut into pieces for worker processes."""
    return [(at, min(at + size, last)) for at in range(first, last, size)]


def train_tokenizer(documents: int, workers: int) -> Tokenizer:
    """A byte-level BPE of exactly VOCABULARY entries over the first documents."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    with multiprocessing.get_context("fork").Pool(workers) as pool:
        texts = [text for part in pool.imap(_texts, spans(0, documents)) for text in part]
    for token in SPECIAL:
        texts = [text.replace(token, "\n") for text in texts]
    tokenizer.train_from_iterator(texts, trainer)
    first = (END_OF_TEXT, tokenizer.token_to_id(END_OF_TEXT))
    tokenizer.post_processor = processors.TemplateProcessing(f"{END_OF_TEXT} $A", f"{END_OF_TEXT} $A $B", [first])
    assert tokenizer.get_vocab_size() == VOCABULARY, (
        f"the text gave only {tokenizer.get_vocab_size()} entries: use more documents"
    )
    return tokenizer


_worker_tokenizer: Tokenizer | None = None


def _start_worker(path: str) -> None:
    global _worker_tokenizer
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _worker_tokenizer = Tokenizer.from_file(path)


def _tokens(span: tuple[int, int]) -> tuple[np.ndarray, int]:
    assert _worker_tokenizer is not None
    texts = _texts(span)
    encoded = _worker_tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    return np.concatenate([np.array(one.ids, np.uint16) for one in encoded]), sum(len(text) for text in texts)


def make_tokens(path: Path, tokenizer_path: Path, documents: int, workers: int) -> tuple[int, int]:
    """Write all documents as one uint16 array; returns (tokens, characters)."""
    characters = 0
    parts = []
    with multiprocessing.get_context("fork").Pool(workers, _start_worker, (str(tokenizer_path),)) as pool:
        for tokens, size in pool.imap(_tokens, spans(0, documents)):
            parts.append(tokens)
            characters += size
    tokens = np.concatenate(parts)
    np.save(path, tokens)
    return len(tokens), characters


# -- the model --------------------------------------------------------------------------------------------------------


def model_config() -> LlamaConfig:
    """6.95 M parameters: 8 layers of width 256, 8 heads over 4 key-value heads, tied embeddings."""
    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=1024,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=4,
        attn_implementation="sdpa",
    )


def export(model: LlamaForCausalLM, tokenizer_path: Path, folder: Path) -> None:
    """Write the Hugging Face layout: bf16 weights, configs that transformers 4 and 5 read, tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    names = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    weights = {name: tensor.detach().to("cpu", torch.bfloat16).contiguous() for name, tensor in names.items()}
    save_file(weights, folder / "model.safetensors.new", metadata={"format": "pt"})
    os.chmod(folder / "model.safetensors.new", 0o644)
    os.replace(folder / "model.safetensors.new", folder / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCABULARY,
        "hidden_size": 256,
        "intermediate_size": 704,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "hidden_act": "silu",
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-05,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "initializer_range": 0.02,
        "tie_word_embeddings": True,
        "use_cache": True,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": 4,
        "torch_dtype": "bfloat16",
    }
    generation = {"bos_token_id": 0, "eos_token_id": [0, 3], "pad_token_id": 4, "do_sample": True, "temperature": 0.8}
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "pad_token": PAD,
        "additional_special_tokens": [USER, ASSISTANT, END],
        "model_max_length": 1024,
        "model_input_names": ["input_ids", "attention_mask"],
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
        "added_tokens_decoder": {
            str(i): {
                "content": token,
                "lstrip": False,
                "normalized": False,
                "rstrip": False,
                "single_word": False,
                "special": True,
            }
            for i, token in enumerate(SPECIAL)
        },
    }
    special = {
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "pad_token": PAD,
        "additional_special_tokens": [USER, ASSISTANT, END],
    }
    for name, content in [
        ("config", config),
        ("generation_config", generation),
        ("tokenizer_config", tokenizer_config),
        ("special_tokens_map", special),
    ]:
        (folder / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    (folder / "tokenizer.json").write_bytes(tokenizer_path.read_bytes())


# -- training ---------------------------------------------------------------------------------------------------------


class Batches:
    """Windows of the token array at random places; seed and step choose them, so a resumed run goes on alike."""

    def __init__(self, path: Path, budget: Budget, device: str) -> None:
        self.tokens = torch.from_numpy(np.load(path).astype(np.int16 if VOCABULARY <= 32767 else np.int32)).to(device)
        self.budget, self.device = budget, device
        self.window = torch.arange(budget.length + 1, device=device)

    def at(self, step: int) -> torch.Tensor:
        """`[batch, length + 1]` token ids of a step."""
        generator = torch.Generator().manual_seed(self.budget.seed * 1_000_003 + step)
        starts = torch.randint(len(self.tokens) - self.budget.length - 1, (self.budget.batch, 1), generator=generator)
        return self.tokens[starts.to(self.device) + self.window].long()


def make_optimizer(model: LlamaForCausalLM, budget: Budget, device: str) -> torch.optim.AdamW:
    """AdamW; matrices decay, norms do not."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": budget.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=budget.learning_rate, betas=(0.9, 0.95), fused=device == "cuda")


def rate(progress: float, budget: Budget) -> float:
    """Learning rate at a share of the budget: linear warm-up, then a cosine to a fiftieth."""
    if progress < budget.warm_up:
        return budget.learning_rate * max(progress / budget.warm_up, 0.02)
    done = min((progress - budget.warm_up) / (1 - budget.warm_up), 1.0)
    return budget.learning_rate * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * done)))


def save_checkpoint(
    path: Path, model: LlamaForCausalLM, optimizer: torch.optim.AdamW, step: int, seconds: float
) -> None:
    """Everything to go on from; renamed into place, so that a crash leaves the last one whole."""
    new = path.with_suffix(".new")
    torch.save(
        {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step, "seconds": seconds}, new
    )
    os.replace(new, path)


def make_step(model: LlamaForCausalLM, device: str, log: Path) -> Any:
    """A function of a batch that gives the mean loss; compiled on CUDA where that works."""
    autocast = torch.autocast("cuda", torch.bfloat16) if device == "cuda" else nullcontext()

    def loss_of(batch: torch.Tensor) -> torch.Tensor:
        with autocast:
            logits = model(input_ids=batch[:, :-1], use_cache=False).logits
        return torch.nn.functional.cross_entropy(logits.reshape(-1, VOCABULARY).float(), batch[:, 1:].reshape(-1))

    return torch.compile(loss_of) if device == "cuda" else loss_of


def train(budget: Budget, work: Path, out: Path, resume: bool, until: float = math.inf) -> dict[str, float]:
    """The loop; the schedule follows whichever of time and steps is further on, and ends at the clock `until`."""
    log = out / "train.log"
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(budget.seed)
    torch.set_float32_matmul_precision("high")
    model = LlamaForCausalLM(model_config()).to(device)
    model.train()
    optimizer = make_optimizer(model, budget, device)
    batches = Batches(work / "tokens.npy", budget, device)
    step, seconds = 0, 0.0
    if resume and (work / "checkpoint.pt").exists():
        state = torch.load(work / "checkpoint.pt", map_location=device, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step, seconds = state["step"], state["seconds"]
        say(log, f"resumed at step {step}")
    loss_of = make_step(model, device, log)
    try:
        started = time.time()
        if device == "cuda":
            loss_of(batches.at(0)).backward()
        say(log, f"first step took {time.time() - started:.1f} s on {device}")
    except Exception as error:
        say(log, f"no compilation ({type(error).__name__}): going on in eager mode")
        loss_of = getattr(loss_of, "_torchdynamo_orig_callable", loss_of)
    optimizer.zero_grad(set_to_none=True)
    budget_seconds = min(budget.minutes * 60, seconds + max(until - time.time(), 1.0))
    last, saved, exported = time.time(), time.time(), time.time()
    began = step
    loss = torch.zeros(())
    while True:
        progress = max(seconds / budget_seconds, step / budget.max_steps)
        if progress >= 1:
            break
        for group in optimizer.param_groups:
            group["lr"] = rate(progress, budget)
        loss = loss_of(batches.at(step))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        if step % 100 == 0 or device == "cpu":
            value = loss.item()  # waits for the device, so the clock below is honest
            speed = (step - began) * budget.batch * budget.length
            say(
                log,
                f"step {step} loss {value:.4f} lr {rate(progress, budget):.2e} {progress:.1%} seconds {seconds:.0f} "
                f"tokens {speed}",
            )
        elif step % 10 == 0:
            torch.cuda.synchronize()
        now = time.time()
        seconds += now - last
        last = now
        if now - saved > 60:
            save_checkpoint(work / "checkpoint.pt", model, optimizer, step, seconds)
            saved = now
        if now - exported > 100:
            export(model, work / "tokenizer.json", out)
            exported = now
    save_checkpoint(work / "checkpoint.pt", model, optimizer, step, seconds)
    export(model, work / "tokenizer.json", out)
    tokens = step * budget.batch * budget.length
    say(
        log,
        f"done: {step} steps, {tokens} tokens, {seconds:.0f} s, {tokens / max(seconds, 1e-9):.0f} tokens/s, "
        f"loss {loss.item():.4f}",
    )
    return {
        "steps": step,
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_second": tokens / max(seconds, 1e-9),
        "last_loss": loss.item(),
    }


def prepare(budget: Budget, work: Path, out: Path, workers: int) -> dict[str, float]:
    """Text, tokenizer and token array, unless a run before has left them in `work`."""
    log = out / "train.log"
    tokenizer_path, tokens_path = work / "tokenizer.json", work / "tokens.npy"
    if not tokenizer_path.exists():
        started = time.time()
        train_tokenizer(budget.tokenizer_documents, workers).save(str(tokenizer_path))
        say(log, f"tokenizer in {time.time() - started:.1f} s")
    if tokens_path.exists():
        return {}
    started = time.time()
    tokens, characters = make_tokens(tokens_path, tokenizer_path, budget.documents, workers)
    say(
        log,
        f"{budget.documents} documents, {characters} characters, {tokens} tokens in {time.time() - started:.1f} s "
        f"with {workers} workers",
    )
    return {
        "documents": budget.documents,
        "characters": characters,
        "text_tokens": tokens,
        "text_seconds": time.time() - started,
    }


def main(arguments: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Train the small story model.")
    parser.add_argument("--out", type=Path, required=True, help="folder for the model and the log")
    parser.add_argument("--work", type=Path, help="folder for tokens and checkpoints (default: OUT.work)")
    parser.add_argument("--minutes", type=float, help="training time")
    parser.add_argument(
        "--wall-minutes", type=float, default=math.inf, help="end after this time, text and compilation included"
    )
    parser.add_argument("--max-steps", type=int, help="end after so many steps, if the time is not over before")
    parser.add_argument("--documents", type=int, help="documents to make")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint in WORK")
    parser.add_argument("--smoke", action="store_true", help="a run of seconds that only shows that all parts work")
    args = parser.parse_args(arguments)
    until = time.time() + args.wall_minutes * 60
    budget = SMOKE if args.smoke else Budget()
    changes = {
        name: value for name in ("minutes", "max_steps", "documents") if (value := getattr(args, name)) is not None
    }
    budget = Budget(**{**asdict(budget), **changes})
    work = args.work or args.out.with_name(args.out.name + ".work")
    args.out.mkdir(parents=True, exist_ok=True)
    work.mkdir(parents=True, exist_ok=True)
    made = prepare(budget, work, args.out, args.workers)
    trained = train(budget, work, args.out, args.resume, until)
    (args.out / "train.json").write_text(
        json.dumps({"budget": asdict(budget), **made, **trained}, indent=2) + "\n", encoding="utf-8"
    )


if __name__ == "__main__":
    main()
