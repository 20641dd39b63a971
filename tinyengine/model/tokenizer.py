"""Text to token ids and back: a model folder's tokenizer, or plain bytes where there is none.

`Tokenizer` gives what the fast tokenizers of `transformers` give, from the same files, and renders chat
templates as its `chat_template_utils.py` does.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
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
        """The prompt of a conversation. Raises ConfigError without a chat template, RequestError if it refuses."""

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
        """The prompt of a conversation. Raises ConfigError without a chat template, RequestError if it refuses."""
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
            raise RequestError(f"the chat template refused the conversation: {error}") from error

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
