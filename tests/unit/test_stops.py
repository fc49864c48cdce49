"""Stop strings: the outcome is a function of the text, whatever its cuts; nothing leaks early."""

from __future__ import annotations

from hypothesis import example, given, settings
from hypothesis import strategies as st

from engine.text.stops import StopStrings

ALPHABET = "abc"
STOPS = st.lists(st.text(ALPHABET, min_size=1, max_size=4), min_size=1, max_size=4)
PIECES = st.lists(st.text(ALPHABET, max_size=4), max_size=12)


def reference(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The match that ends first, the longest of those; then the text before it."""
    for end in range(1, len(text) + 1):
        ending = [s for s in stops if text[:end].endswith(s)]
        if ending:
            stop = max(ending, key=len)
            return text[: end - len(stop)], stop
    return text, None


def run(pieces: list[str], stops: list[str]) -> tuple[list[str], str | None]:
    matcher = StopStrings(stops)
    shown = []
    for piece in pieces:
        text, stop = matcher.push(piece)
        shown.append(text)
        if stop is not None:
            return shown, stop
    return [*shown, matcher.flush()], None


@settings(max_examples=500, deadline=None)
@given(pieces=PIECES, stops=STOPS)
@example(pieces=["a", "ab"], stops=["aab", "ab"])
@example(pieces=["ababc"], stops=["abc", "ba"])
def test_equals_a_character_by_character_reference(pieces, stops):
    shown, stop = run(pieces, stops)
    assert ("".join(shown), stop) == reference("".join(pieces), stops)


@settings(max_examples=300, deadline=None)
@given(pieces=PIECES, stops=STOPS)
def test_shown_text_is_never_part_of_a_stop(pieces, stops):
    """After each piece, what is shown plus any future cannot need to be taken back."""
    matcher, shown, seen = StopStrings(stops), "", ""
    for piece in pieces:
        seen += piece
        text, stop = matcher.push(piece)
        shown += text
        if stop is not None:
            return
        held = seen[len(shown) :]
        assert seen.startswith(shown)
        # Held: exactly the longest end that could still become a stop, no more.
        could = [
            e
            for n in range(len(seen) + 1)
            if any(s.startswith(e := seen[n:]) and s != e for s in stops)
        ]
        assert held == max(could, key=len, default="")


def test_hold_back_and_flush():
    matcher = StopStrings(["<end>"])
    assert matcher.push("hello <e") == ("hello ", None)
    assert matcher.push("n") == ("", None)
    assert matcher.push("x") == ("<enx", None)
    assert matcher.push("<en") == ("", None)
    assert matcher.flush() == "<en"
    assert matcher.flush() == ""


def test_a_stop_inside_one_piece_cuts_there():
    assert StopStrings(["\n\n"]).push("one\n\ntwo") == ("one", "\n\n")


def test_no_stops_passes_everything():
    assert StopStrings([]).push("abc") == ("abc", None)
