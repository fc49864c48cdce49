"""The slot protocol of engine/kernels/put_signal.py over ALL interleavings, and broken variants that
the same checker must catch.

An end is a list of stages; the operations of a stage happen in any order, interleaved with the
other end's, so a missing fence is two stages made one. A payload is two words: a torn one shows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import pytest

from engine.kernels.put_signal import SLOTS

ARMED, ABORTED = -1, -2  # an abort word satisfies a wait: `passes`
LAST = 3  # sequence numbers 1, 2, 3, 1, ...: they wrap within a short run


class Op(NamedTuple):
    kind: str  # wait, store, read, verdict (the consumer's kernel looks at the header once)
    word: tuple[str, int]
    value: int = 0
    compare: str = "magnitude"


class Violation(Exception):
    pass


@dataclass(frozen=True)
class Protocol:
    """Every field's default is ours; a test changes one."""

    calls: int = 7  # hand-offs over all replays
    replay: int = 3  # of them in a graph: what a captured constant repeats after
    slots: int = SLOTS
    credit_wait: bool = True
    credit_taken: str = "before the header"  # | "with the header" | "never"
    header: str = "after the payload"  # | "with the payload"
    acquire: bool = True
    rearm: str = "before the credit"  # | "with the credit" | "after the credit" | "never"
    credit: str = "after the reads"  # | "with the reads"
    compare: str = "magnitude"  # | "equal" | "at least": to the number that was captured
    numbers: str = "sequence"  # | "captured" (constants of the graph) | "signed" (wrap into bit 31)
    consumer_rotates_on: bool = False  # its slots do not start anew with a replay

    def number(self, call: int) -> int:
        if self.numbers == "captured":
            call %= self.replay
        if self.numbers == "signed":
            return call + 1 if call < LAST else ARMED
        return call % LAST + 1

    def slot(self, call: int, consumer: bool = False) -> int:
        return (call if consumer and self.consumer_rotates_on else call % self.replay) % self.slots

    def producer(self) -> list[tuple[Op, ...]]:
        stages: list[tuple[Op, ...]] = []
        for call in range(self.calls):
            slot = self.slot(call)
            payload = tuple(Op("store", (part, slot), call) for part in ("a", "b"))
            header = (Op("store", ("header", slot), self.number(call)),)
            taken = (Op("store", ("credit", slot), ARMED),)
            if self.credit_wait:
                stages.append((Op("wait", ("credit", slot)),))
            if self.credit_taken == "before the header":
                payload += taken
            elif self.credit_taken == "with the header":
                header += taken
            stages += (
                [payload, header] if self.header == "after the payload" else [payload + header]
            )
        return stages

    def consumer(self) -> list[tuple[Op, ...]]:
        stages: list[tuple[Op, ...]] = []
        for call in range(self.calls):
            slot = self.slot(call, consumer=True)
            captured = self.number(call % self.replay)
            wait = (Op("wait", ("header", slot), captured, self.compare),)
            reads = tuple(Op("read", (part, slot), call) for part in ("a", "b"))
            verdict = (Op("verdict", ("header", slot), self.number(call)),)
            arm = (Op("store", ("header", slot), ARMED),)
            give = (Op("store", ("credit", slot), self.number(call)),)
            stages += [wait, reads] if self.acquire else [wait + reads]
            end = {
                "before the credit": [verdict, arm, give],
                "with the credit": [verdict, arm + give],
                "after the credit": [verdict, give, arm],
                "never": [verdict, give],
            }[self.rearm]
            if self.credit == "with the reads":
                stages[-1] += give
                end = [verdict, arm]
            stages += end
        return stages


def passes(op: Op, value: int) -> bool:
    if value == ABORTED:
        return True
    if op.compare == "equal":
        return value == op.value
    return value != ARMED and (op.compare == "magnitude" or value >= op.value)


class State(NamedTuple):
    """done: operations of the stage; live: not dead; skip: the verdict found an abort word."""

    stage: tuple[int, int]
    done: tuple[int, int]
    memory: tuple[int, ...]
    skip: tuple[bool, bool] = (False, False)
    dead: bool = False
    swept: bool = False


class Checker:
    """abort: "" (nobody dies), "sweeping" (the producer may die anywhere; then a watchdog writes
    abort words until the consumer ends) or "once" (it sweeps once). sticky: the consumer leaves an
    abort word as it is."""

    def __init__(self, protocol: Protocol, abort: str = "", sticky: bool = True) -> None:
        self.ends = (protocol.producer(), protocol.consumer())
        self.abort, self.sticky = abort, sticky
        names = [(n, s) for n in ("a", "b", "header", "credit") for s in range(protocol.slots)]
        self.index = {name: i for i, name in enumerate(names)}
        first = {"header": ARMED, "credit": 0}
        self.first = State((0, 0), (0, 0), tuple(first.get(n, -9) for n, _ in names))

    def over(self, state: State, end: int) -> bool:
        return state.stage[end] == len(self.ends[end])

    def next_states(self, state: State) -> Iterator[State]:
        for end in (0, 1):
            if self.over(state, end) or (end == 0 and state.dead):
                continue
            for i, op in enumerate(self.ends[end][state.stage[end]]):
                if not state.done[end] >> i & 1:
                    value = state.memory[self.index[op.word]]
                    if op.kind != "wait" or passes(op, value):
                        yield self.step(state, end, i, op, value)
        if self.abort and not state.dead and not self.over(state, 0):
            yield state._replace(dead=True)
        if state.dead and not (self.abort == "once" and state.swept):
            words = list(state.memory)
            for (name, _), i in self.index.items():
                if name in ("header", "credit"):
                    words[i] = ABORTED
            yield state._replace(memory=tuple(words), swept=True)

    def step(self, state: State, end: int, i: int, op: Op, value: int) -> State:
        memory, skip = list(state.memory), list(state.skip)
        void = state.dead and state.swept  # the status word says so: results are not used
        if op.kind == "wait":
            skip[end] = self.sticky and value == ABORTED and end == 0  # a put that is refused
        elif op.kind == "read" and value != op.value and not void:
            raise Violation(f"payload of call {value} read in call {op.value}")
        elif op.kind == "verdict":
            skip[end] = self.sticky and value == ABORTED
            if value not in (op.value, ABORTED) and not void:
                raise Violation(f"header {value} instead of {op.value}")
        elif op.kind == "store" and not skip[end]:
            memory[self.index[op.word]] = op.value
        stage, done = list(state.stage), list(state.done)
        done[end] |= 1 << i
        if done[end] == (1 << len(self.ends[end][stage[end]])) - 1:
            stage[end], done[end] = stage[end] + 1, 0
        return state._replace(
            stage=tuple(stage), done=tuple(done), memory=tuple(memory), skip=tuple(skip)
        )

    def run(self, limit: int = 300_000) -> str | None:
        """The first fault in any reachable state, or None."""
        seen, stack = {self.first}, [self.first]
        while stack:
            state = stack.pop()
            try:
                following = set(self.next_states(state)) - {state}
            except Violation as violation:
                return str(violation)
            if not following and not (self.over(state, 1) and (state.dead or self.over(state, 0))):
                return "hang"
            stack += following - seen
            seen |= following
            assert len(seen) < limit, "too many states"
        return None


OURS = Protocol()


@pytest.mark.parametrize(
    ("slots", "replay", "calls"), [(3, 3, 7), (3, 1, 4), (3, 4, 9), (3, 2, 5), (2, 2, 5), (1, 1, 4)]
)
def test_ours(slots, replay, calls):
    """Any number of slots and any pattern of calls; sequence numbers wrap after three."""
    assert Checker(replace(OURS, slots=slots, replay=replay, calls=calls)).run() is None


def test_a_producer_runs_three_ahead():
    """Not a protocol that merely takes turns: three puts are there before the first is read."""
    checker = Checker(OURS)
    state = checker.first
    while moves := [s for s in checker.next_states(state) if s.stage[1] == s.done[1] == 0]:
        state = moves[0]
    assert [state.memory[checker.index["header", s]] for s in range(3)] == [1, 2, 3]
    assert checker.ends[0][state.stage[0]][0].kind == "wait", "the fourth put waits"


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (dict(header="with the payload"), "payload"),
        (dict(acquire=False), "payload"),
        (dict(credit_wait=False), "payload"),
        (dict(credit_wait=False, slots=2, replay=2), "payload"),
        (dict(credit="with the reads"), "payload"),
        (dict(credit_taken="never"), "payload"),
        (dict(rearm="never"), "payload"),
        (dict(rearm="with the credit"), "hang"),
        (dict(rearm="after the credit"), "hang"),
        (dict(credit_taken="with the header"), "hang"),
        # Equality with a captured number: the second replay's header has another one.
        (dict(compare="equal", replay=2), "hang"),
        # The same number in every replay makes it pass, and a stale header then passes as well.
        (dict(compare="equal", numbers="captured", rearm="never"), "payload"),
        # A number that only grows, compared by magnitude with the captured one, and never re-armed.
        (dict(compare="at least", rearm="never", calls=6), "payload"),
        # Numbers that wrap into the armed pattern.
        (dict(numbers="signed"), "hang"),
        # One end starts a replay at slot 0 and the other goes on.
        (dict(replay=2, consumer_rotates_on=True), None),
    ],
)
def test_broken_variants_are_caught(change, fault):
    found = Checker(replace(OURS, **change)).run()
    assert found is not None, f"{change} passed"
    assert fault is None or fault in found, found


def test_short_runs_do_not_catch_them():
    """Why the model needs replays: these pass as long as no slot is used twice."""
    for change in (dict(rearm="never"), dict(compare="equal"), dict(credit_wait=False)):
        assert Checker(replace(OURS, calls=3, **change)).run() is None


def test_dead_producer_never_hangs_the_consumer():
    assert Checker(OURS).run() is None
    assert Checker(OURS, abort="sweeping").run() is None
    assert Checker(replace(OURS, replay=1, calls=4), abort="sweeping").run() is None
    # Slots returned by stream writes, which re-arm an abort word without a look.
    assert Checker(OURS, abort="sweeping", sticky=False).run() is None


def test_abort_words_written_once_are_not_enough():
    """A kernel that had already looked re-arms one header after the sweep; and kernels that do not
    leave abort words alone re-arm all of them."""
    assert Checker(OURS, abort="once", sticky=False).run() == "hang"
    assert Checker(replace(OURS, replay=1, calls=4), abort="once").run() == "hang"
