"""Token ids to readable text as they come: never half a character, and cut at a stop string.

`Detokenizer` decodes a sliding window, as TGI and vLLM do; `StopStrings` holds back what could still become a stop.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tinyengine.errors import RequestError
from tinyengine.model.tokenizer import TextTokenizer


class Detokenizer:
    """One request's ids to text, as they come. A token costs the decoding of a few, however long the text.

    The pieces and the flush together are what these ids add to `decode` of the context, and no piece ends in half
    a character:

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
        self._added = False  # whether anything but context is in the window
        self._slide(self._WINDOW, held=int(tokenizer.decode(self._ids).endswith("\ufffd")))

    def add(self, token_ids: Iterable[int]) -> str:
        """Take the next ids; give the text that became readable."""
        return "".join(self._add(token_id) for token_id in token_ids)

    def flush(self, token_ids: Sequence[int] = ()) -> str:
        """The text still held back and that of the last ids, when no more will come; half a character is U+FFFD."""
        last = [i for i in token_ids if not self._tokenizer.is_silent(i)]
        self._ids += last
        self._added |= bool(last)
        text = self._tokenizer.decode(self._ids)[self._shown :] if self._added else ""
        self._ids, self._shown, self._run = [], 0, 0
        return text

    def _add(self, token_id: int) -> str:
        if self._tokenizer.is_silent(token_id):
            return ""
        self._ids.append(token_id)
        self._added = True
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
