"""Stop strings over streamed text: nothing that may become part of a stop string is shown."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Watches text that arrives in pieces; the outcome does not depend on where pieces are cut.

    The match that ends first wins, and of those that end together the longest. Text is held back
    while its end is a proper prefix of a stop string.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = sorted(stops, key=len, reverse=True)
        self._held = ""

    def push(self, delta: str) -> tuple[str, str | None]:
        """(text that can be shown now, the stop string that ended the text or None)."""
        if not self._stops:
            return delta, None
        text = self._held + delta
        found = [(i + len(s), i, s) for s in self._stops if (i := text.find(s)) >= 0]
        if found:
            _, start, stop = min(found)
            self._held = ""
            return text[:start], stop
        cut = len(text) - self._partial(text)
        self._held = text[cut:]
        return text[:cut], None

    def flush(self) -> str:
        """The held text: at EOS, at the length limit or on abort it is part of the answer."""
        held, self._held = self._held, ""
        return held

    def _partial(self, text: str) -> int:
        """Length of the longest end of `text` that is a proper prefix of a stop string."""
        longest = min(len(text), max(map(len, self._stops)) - 1)
        for n in range(longest, 0, -1):
            end = text[-n:]
            if any(s.startswith(end) for s in self._stops):
                return n
        return 0
