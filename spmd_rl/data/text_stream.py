"""Text of tokens that come one by one."""

from collections.abc import Sequence
from typing import Any

from spmd_rl.data.response_text import ResponseText

UNFINISHED = "\ufffd"


class TextStream:
    """Decodes what was added so far; the pieces joined are the text of all tokens.

    A token is decoded together with the few before it: what it spells may depend on them. Bytes that are not yet a
    character are held back.
    """

    def __init__(self, tokenizer: Any, ends: Sequence[int] = ()):
        self.text = ResponseText(tokenizer, ends)
        self._ids: list[int] = []
        self._start = self._said = 0

    def add(self, ids: Sequence[int], last: bool = False) -> str:
        """The text that is certain now. `last`: there will be no more tokens."""
        self._ids += self.text.ids(ids)
        before = self.text(self._ids[self._start : self._said])
        now = self.text(self._ids[self._start :])
        if now.endswith(UNFINISHED) and not last:
            return ""
        self._start, self._said = self._said, len(self._ids)
        return now[len(before) :]
