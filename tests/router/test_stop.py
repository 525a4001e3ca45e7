"""Stop strings over text in pieces: nothing of a stop leaks, nothing else is held back."""

import itertools
import time

from hypothesis import given
from hypothesis import strategies as st

from router.text.stop import StopMatcher, StopSet

SMALL = st.text(alphabet="abc", max_size=40)
STOPS = st.lists(st.text(alphabet="abc", min_size=1, max_size=5), min_size=1, max_size=6)


def run(
    pieces: list[str], stops: list[str], *, include_stop: bool = False
) -> tuple[list[str], bool]:
    matcher = StopMatcher(StopSet(stops), include_stop=include_stop)
    out = []
    for piece in pieces:
        text, is_stopped = matcher.push(piece)
        out.append(text)
        if is_stopped:
            return out, True
    out.append(matcher.flush())
    return out, False


def expected(text: str, stops: list[str]) -> tuple[str, str | None]:
    """By hand: the first position at which a stop is complete, and the longest that ends there."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(text=SMALL, stops=STOPS, cuts=st.lists(st.integers(0, 40), max_size=8))
def test_b01_b02_text_ends_just_before_the_stop_however_it_is_cut_into_pieces(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    edges = sorted({0, len(text), *(min(cut, len(text)) for cut in cuts)})
    pieces = [text[a:b] for a, b in itertools.pairwise(edges)]
    before, stop = expected(text, stops)
    out, is_stopped = run(pieces, stops)
    assert "".join(out) == before
    assert is_stopped == (stop is not None)
    out, _ = run(pieces, stops, include_stop=True)
    assert "".join(out) == before + (stop or "")


@given(text=SMALL, stops=STOPS)
def test_b03_only_a_true_prefix_of_a_stop_is_held_back(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(StopSet(stops))
    sent = ""
    for number, char in enumerate(text, start=1):
        piece, is_stopped = matcher.push(char)
        if is_stopped:
            return
        sent += piece
        held = text[len(sent) : number]
        assert held == max(
            (s[:k] for s in stops for k in range(len(s)) if text[:number].endswith(s[:k])), key=len
        )


def test_b03_a_stop_that_never_occurs_delays_nothing() -> None:
    matcher = StopMatcher(StopSet(["#" * 40]))
    assert [matcher.push(word) for word in ("Once", " upon", " a")] == [
        ("Once", False),
        (" upon", False),
        (" a", False),
    ]


def test_b01_one_stop_is_a_prefix_of_the_other() -> None:
    assert run(["one two three"], ["two", "two three"]) == (["one "], True)


def test_b20_a_match_before_min_tokens_does_not_count() -> None:
    matcher = StopMatcher(StopSet(["stop"]))
    assert matcher.push("a stop b st", may_stop=False) == ("a stop b ", False)
    assert matcher.push("op c") == ("", True)


@given(early=SMALL, late=SMALL, stops=STOPS)
def test_b20_an_ignored_match_loses_no_text(early: str, late: str, stops: list[str]) -> None:
    matcher = StopMatcher(StopSet(stops))
    first, _ = matcher.push(early, may_stop=False)
    second, is_stopped = matcher.push(late)
    whole = first + second + ("" if is_stopped else matcher.flush())
    assert (early + late).startswith(whole)
    if not is_stopped:
        assert whole == early + late


def test_b36_a_thousand_stops_cost_little() -> None:
    stops = StopSet([f"stop number {n} of many" for n in range(1000)])
    matcher = StopMatcher(stops)
    text = "nothing of the sort, stop number "

    def time_of_a_push() -> float:
        started = time.thread_time()
        matcher.push(text)
        return time.thread_time() - started

    # processor time, the best of many: what else the machine does is not the matcher's cost
    assert min(time_of_a_push() for _ in range(100)) / len(text) < 10e-6
