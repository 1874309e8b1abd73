"""The text of one sequence while its tokens arrive, cut before the first stop string."""

from __future__ import annotations

from collections.abc import Sequence

from ...shardplan.errors import UsageError
from .incremental import detokenizer
from .tokenizer import Tokenizer


class StopMatcher:
    """Lets text through until a stop string begins in it; the first one to begin wins, the shortest of those.

    The result does not depend on how the text is cut into pieces: text is held back while it could still turn out to
    be the beginning of a stop string.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if "" in stops:
            raise UsageError("a stop string is empty, so that nothing could ever be generated", "leave it out")
        self._stops = tuple(stops)
        self._held = ""
        self.stopped: str | None = None

    def push(self, text: str) -> str:
        """The part of the text so far that is certain and was not given out yet."""
        if self.stopped is not None:
            return ""
        self._held += text
        match = self._first_match()
        # A stop string that began earlier than the match and is not complete yet would cut the text earlier.
        begins = self._first_beginning(len(self._held) if match is None else match[0])
        if match is not None and begins >= match[0]:
            return self._cut(match)
        certain, self._held = self._held[:begins], self._held[begins:]
        return certain

    def finish(self) -> str:
        """What was held back, no more text being expected."""
        match = self._first_match() if self.stopped is None else None
        if match is not None:
            return self._cut(match)
        rest, self._held = self._held, ""
        return rest

    def _cut(self, match: tuple[int, str]) -> str:
        text, self._held = self._held[: match[0]], ""
        self.stopped = match[1]
        return text

    def _first_match(self) -> tuple[int, str] | None:
        """(start, stop string) of the first complete match in the held text."""
        found = [(start, stop) for stop in self._stops if (start := self._held.find(stop)) >= 0]
        return min(found, key=lambda match: (match[0], len(match[1])), default=None)

    def _first_beginning(self, limit: int) -> int:
        """The first position before `limit` from which on the held text begins a stop string, else `limit`."""
        for stop in self._stops:
            start = max(0, len(self._held) - len(stop) + 1)
            while 0 <= (start := self._held.find(stop[0], start, limit)) < limit:
                if stop.startswith(self._held[start:]):
                    limit = start
                start += 1
        return limit


class TextStream:
    """The text of one sequence, token by token.

    The pieces that `push` and `finish` return, joined, are `tokenizer.decode` of all ids, cut before the first stop
    string. Each call costs the same, however long the sequence is.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str] = (),
        skip_special_tokens: bool = True,
        continues_text: bool = False,
    ) -> None:
        """`stop`: strings that end the text and are not part of it. The rest is as in `Tokenizer.decode`."""
        self._detokenizer = detokenizer(tokenizer, skip_special_tokens, continues_text)
        self._matcher = StopMatcher(stop)
        self._given: list[str] = []
        self.decoded_length = 0
        """Characters that the tokens so far stand for, those held back included, half ones not."""

    @property
    def stopped(self) -> str | None:
        """The stop string that ended the text, None as long as none did."""
        return self._matcher.stopped

    @property
    def text(self) -> str:
        """The text so far: every piece that was returned."""
        return "".join(self._given)

    def push(self, token_id: int) -> str:
        """The text that is certain now that `token_id` has come: whole characters that begin no stop string."""
        if self.stopped is not None:
            return ""
        decoded = self._detokenizer.push(token_id)
        self.decoded_length += len(decoded)
        return self._give(self._matcher.push(decoded))

    def finish(self) -> str:
        """The text that was held back, the sequence being complete."""
        if self.stopped is not None:
            return ""
        last = self._matcher.push(self._detokenizer.finish())
        return self._give(last + self._matcher.finish())

    def _give(self, text: str) -> str:
        if text:
            self._given.append(text)
        return text
