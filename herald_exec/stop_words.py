"""Ends a streamed text at the first stop word, and never shows a part of one."""

from collections.abc import Sequence

from herald_pipeline.errors import raise_problems


class StopWords:
    """Text in, pieces out, until a stop word appears.

    What could be the beginning of a stop word is held back until the next piece decides.
    """

    def __init__(self, words: Sequence[str] = ()) -> None:
        raise_problems("a stop word must not be empty" if not word else None for word in words)
        self._words = tuple(words)
        self._held = ""
        self.found: str | None = None

    def push(self, text: str) -> str:
        """The part of held and new text that may be shown; ``found`` says whether a stop word ended it."""
        if self.found is not None:
            return ""
        text = self._held + text
        hits = [(text.index(word), -len(word), word) for word in self._words if word in text]
        if hits:
            place, _, self.found = min(hits)
            self._held = ""
            return text[:place]
        keep = self._open_end(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """What was held back when the text ended without a stop word."""
        text, self._held = self._held, ""
        return text if self.found is None else ""

    def _open_end(self, text: str) -> int:
        """Length of the longest end of ``text`` that begins a stop word."""
        longest = 0
        for word in self._words:
            for size in range(min(len(word) - 1, len(text)), longest, -1):
                if text.endswith(word[:size]):
                    longest = size
                    break
        return longest
