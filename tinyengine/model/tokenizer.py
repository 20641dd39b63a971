"""Text to token ids and back: a model folder's tokenizer, plain bytes where there is none, and streaming.

`Tokenizer` gives what the fast tokenizers of `transformers` give, from the same files, and renders chat
templates as its `chat_template_utils.py` does. `Detokenizer` makes readable text of a stream of ids by a
sliding window, as TGI and vLLM do, and `StopStrings` cuts it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn, Protocol

import tokenizers
from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tinyengine.errors import ConfigError, RequestError
from tinyengine.model.config import read_json

Message = dict[str, str]
_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class TextTokenizer(Protocol):
    """What the engine asks of a tokenizer."""

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included. A model's vocabulary is often padded to more."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text. Raises RequestError if it is not valid Unicode."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids; ids outside the vocabulary give nothing."""

    def apply_chat_template(self, messages: Sequence[Message], add_generation_prompt: bool = True) -> str:
        """The prompt of a conversation. Raises ConfigError if there is no chat template or it fails."""

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of a conversation's prompt; the template writes the special tokens itself."""

    def is_silent(self, token_id: int) -> bool:
        """Whether `decode` leaves this id out, whatever stands beside it."""

    def is_byte(self, token_id: int) -> bool:
        """Whether this is a byte token of a byte-fallback vocabulary: a run of them is decoded together."""


class Tokenizer:
    """A Hugging Face `tokenizer.json` with its chat template.

    `clean_up_tokenization_spaces` is not followed: it would rewrite text that was streamed already.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        chat_template: str | None = None,
        named: dict[str, str] | None = None,
    ) -> None:
        """`named`: tokens that the template may write, such as `bos_token`."""
        backend.no_truncation()  # a length to cut or pad to may be left in the file
        backend.no_padding()
        self._backend = backend
        self._chat_template = chat_template
        self.named_tokens = named or {}
        self._special = {i for i, token in backend.get_added_tokens_decoder().items() if token.special}
        self._bytes = _byte_token_ids(backend)

    @classmethod
    def from_folder(cls, path: str | Path) -> Tokenizer:
        """Read `tokenizer.json` and, where they are there, `tokenizer_config.json` and `chat_template.jinja`.

        Raises ConfigError if a file is missing or damaged.
        """
        folder = Path(path)
        backend = _read_backend(folder / "tokenizer.json")
        config_path = folder / "tokenizer_config.json"
        config = read_json(config_path, ConfigError) if config_path.exists() else {}
        named = {}
        for key in _NAMED_TOKENS:
            token = config.get(key)
            token = token.get("content") if isinstance(token, dict) else token  # a string or a saved AddedToken
            if isinstance(token, str):
                named[key] = token
        return cls(backend, _read_chat_template(folder, config), named)

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included. A model's vocabulary is often padded to more."""
        return int(self._backend.get_vocab_size(with_added_tokens=True))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text. Raises RequestError if it is not valid Unicode."""
        _utf8(text)
        return list(self._backend.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids; ids outside the vocabulary give nothing."""
        return str(self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def apply_chat_template(self, messages: Sequence[Message], add_generation_prompt: bool = True) -> str:
        """The prompt of a conversation. Raises ConfigError if there is no chat template or it fails."""
        if self._chat_template is None:
            raise ConfigError("the tokenizer has no chat template; give a plain prompt instead")
        try:
            return self._template.render(
                messages=list(messages),
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self.named_tokens,
            )
        except Exception as error:  # a template is a program of somebody else's: it may fail in any way
            raise ConfigError(f"the chat template failed: {error}") from error

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of a conversation's prompt; the template writes the special tokens itself."""
        return self.encode(self.apply_chat_template(messages), add_special_tokens=False)

    def is_silent(self, token_id: int) -> bool:
        """Whether `decode` leaves this id out, whatever stands beside it."""
        return token_id in self._special or self._backend.id_to_token(token_id) is None

    def is_byte(self, token_id: int) -> bool:
        """Whether this is a byte token of a byte-fallback vocabulary: a run of them is decoded together."""
        return token_id in self._bytes

    @cached_property
    def _template(self) -> Template:
        return _environment().from_string(self._chat_template or "")


class ByteTokenizer:
    """UTF-8 bytes as ids 0 to 255, for presets with random weights. Larger ids decode to nothing."""

    vocab_size = 256

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The bytes of a text. Raises RequestError if it is not valid Unicode."""
        return list(_utf8(text))

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of bytes, U+FFFD for what is not UTF-8; ids above 255 give nothing."""
        return bytes(i for i in ids if not self.is_silent(i)).decode("utf-8", errors="replace")

    def apply_chat_template(self, messages: Sequence[Message], add_generation_prompt: bool = True) -> str:
        """Raises ConfigError: plain bytes have no chat template."""
        raise ConfigError("a model without a tokenizer has no chat template; give a plain prompt instead")

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Raises ConfigError: plain bytes have no chat template."""
        return self.encode(self.apply_chat_template(messages))

    def is_silent(self, token_id: int) -> bool:
        """Whether `decode` leaves this id out."""
        return not 0 <= token_id < self.vocab_size

    def is_byte(self, token_id: int) -> bool:
        """False: bytes are not decoded in runs here, one bad byte spoils itself alone."""
        return False


class Detokenizer:
    """One request's ids to text, as they come. A token costs the decoding of a few, however long the text.

    The pieces and the flush together are what these ids add to `decode` of the context, and no piece ends in half a character:

    - A text that ends in U+FFFD may end in the first bytes of a character, at most 3. That one U+FFFD is held
      until something follows it, and all before it is settled.
    - A byte-fallback decoder (Llama 2) turns a whole run of byte tokens into U+FFFD if one byte of it is
      wrong, so a run is held until it ends. After `_LONGEST_RUN` tokens it is shown anyway: only if that run
      turns out wrong later do the pieces differ from `decode`, in that what was shown stays.
    """

    _WINDOW = 4  # tokens: more than a begun character has bytes
    _LONGEST_RUN = 16

    def __init__(self, tokenizer: TextTokenizer, context_ids: Sequence[int] = ()) -> None:
        """`context_ids`: the prompt that is continued. A Llama 2 decoder strips the first space of what it is
        given, so without context the text of " upon" after "Once" would be "upon"."""
        self._tokenizer = tokenizer
        # The window: the tokens just shown, and those not yet shown.
        self._ids = [i for i in context_ids[-4 * self._WINDOW :] if not tokenizer.is_silent(i)]
        self._shown = 0  # characters of the window's text that were given out
        self._run = 0  # byte tokens at the end of the window
        self._slide(self._WINDOW, held=int(tokenizer.decode(self._ids).endswith("\ufffd")))

    def add(self, token_ids: Iterable[int]) -> str:
        """Take the next ids; give the text that became readable."""
        return "".join(self._add(token_id) for token_id in token_ids)

    def flush(self) -> str:
        """The text still held back, when no more ids will come; half a character is U+FFFD."""
        text = self._tokenizer.decode(self._ids)[self._shown :]
        self._ids, self._shown, self._run = [], 0, 0
        return text

    def _add(self, token_id: int) -> str:
        if self._tokenizer.is_silent(token_id):
            return ""
        self._ids.append(token_id)
        self._run = self._run + 1 if self._tokenizer.is_byte(token_id) else 0
        if 0 < self._run < self._LONGEST_RUN:
            return ""
        text = self._tokenizer.decode(self._ids)
        held = int(self._run == 0 and text.endswith("\ufffd"))
        if 0 < self._run < self._LONGEST_RUN + 3 and text.endswith("\ufffd" * self._run):
            return ""  # a long run is cut between two characters, if it has any
        piece = text[self._shown : len(text) - held]
        self._slide(len(text[-1:].encode()) if self._run else self._WINDOW, held)
        return piece

    def _slide(self, keep: int, held: int) -> None:
        """Forget all but the last tokens, without which the next would be decoded as the text's first."""
        del self._ids[:-keep]
        self._shown = len(self._tokenizer.decode(self._ids)) - held
        self._run = 0


class StopStrings:
    """Cuts one request's text before the stop string that is complete first, whatever its pieces.

    Of two that are complete at the same character the longer one counts. Text is held back only while its end
    could still become a stop string. Raises RequestError for an empty stop string.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if not all(stops):
            raise RequestError("a stop string is empty; leave it out")
        self._stops = tuple(stops)
        self._held = ""
        self.stopped = False

    def push(self, text: str) -> tuple[str, bool]:
        """Take the next piece; give the text that is safe to show and whether a stop string was completed."""
        if self.stopped:
            return "", True
        text, self._held = self._held + text, ""
        found = [(start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0]
        if found:
            self.stopped = True
            return text[: min(found)[1]], True
        safe = len(text) - self._length_to_hold(text)
        self._held = text[safe:]
        return text[:safe], False

    def flush(self) -> str:
        """The text still held back, when no more will come."""
        text, self._held = self._held, ""
        return text

    def _length_to_hold(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        longest = max((len(stop) - 1 for stop in self._stops), default=0)
        lengths = range(min(longest, len(text)), 0, -1)
        return next((n for n in lengths if any(stop.startswith(text[-n:]) for stop in self._stops)), 0)


def _utf8(text: str) -> bytes:
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError(f"the text is not valid Unicode: {error.reason} at character {error.start}") from None


def _byte_token_ids(backend: tokenizers.Tokenizer) -> set[int]:
    """Ids of `<0x00>` to `<0xFF>` if the decoder reads them as bytes, else none."""
    if backend.decoder is None or backend.decoder.decode(["<0x41>"]) != "A":
        return set()
    ids = (backend.token_to_id(f"<0x{byte:02X}>") for byte in range(256))
    return {i for i in ids if i is not None}


def _read_backend(path: Path) -> tokenizers.Tokenizer:
    if not path.is_file():
        what = f"{path} is missing" if path.parent.is_dir() else f"there is no folder {path.parent}"
        raise ConfigError(f"{what}; a tokenizer of the fast kind is needed (tokenizer.json)")
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises a bare Exception
        raise ConfigError(f"{path} is not a tokenizer ({error}); download it again") from None


def _read_chat_template(folder: Path, config: dict[str, Any]) -> str | None:
    """`chat_template.jinja` or, without it, the config's `chat_template`: one, or several with names."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path} cannot be read: {error}") from None
    path, template = folder / "tokenizer_config.json", config.get("chat_template")
    if isinstance(template, list):
        named = {t.get("name"): t.get("template") for t in template if isinstance(t, dict)}
        template = named.get("default")
        if template is None:
            names = ", ".join(map(str, named))
            raise ConfigError(f"{folder / 'tokenizer_config.json'}: no chat_template is named default, only {names}")
    if template is not None and not isinstance(template, str):
        raise ConfigError(f"{folder / 'tokenizer_config.json'}: chat_template must be a string or a list of named ones")
    return template


class _GenerationTag(Extension):
    """`{% generation %}` marks the assistant's words for training; here its body is rendered as it stands."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _environment() -> ImmutableSandboxedEnvironment:
    """Jinja as in transformers: sandboxed, since templates come from strangers, and with extra names."""

    def raise_exception(message: str) -> NoReturn:
        raise TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)  # jinja2's own escapes HTML

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    return environment
