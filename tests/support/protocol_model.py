"""The protocol of an op on GPUs (docs/protocol.md) as a state machine, searched through breadth first.

Every rank runs the same ops one after the other, each with one or several blocks. One step of the model is
one access to what ranks share: an addition to a gate, which opens an op, a word published to one rank, a
reason stored into a peer's gate, `left` of one block stored to one peer. Between any two steps every other
block may do any number of its own, and every wait may expire at any moment. While a block moves, it may touch
any peer at any time; so each state in which it moves is one in which it touches them all.

One rank may stop for ever, at any moment. Unless it has opened the op, nobody may need it; if it has, its
process is known to be gone, and nobody waits for it. (If not, the second time-out stops the GPU.)

Covered are all interleavings of those steps, time-outs, mismatches, failures before and after a rank has
opened, ops after a failed one, and blocks that wait once more after they have left (`spreads`, one wave). Not
covered are the memory's ordering (here all is sequentially consistent; on the devices acquire and release see
to it), clocks, the 32 bits of an epoch, resets, several channels, two ops at a time in one channel.

`search` returns what breaks one of these, with the steps that lead there:

  I1  Nobody touches a rank's memory before it has published in that op, or after it has returned from it.
  I2  A rank that reports success has all its peers' data: every block of every rank has moved all of it, and
      its own blocks have handed on all that came.
  I3  Every rank returns, whatever the others do, unless one is stuck inside.
  I4  Where the signatures differ nobody touches anything.
"""

import dataclasses
import functools
from collections.abc import Iterator
from typing import NamedTuple

# What a block does. The first block of a rank begins with OPENS, the others with WAITS.
OPENS, OPENS_LATE, TAKES_BACK, NOTES, PUBLISHES, WAITS, CLOSES, MOVES, TELLS, SPREADS, ENDED = range(11)

# What a protocol can do wrong: each must be found.
FAULTS = {
    "opens in two steps": "the gate is read first, and one is added later",
    "keeps what it added": "a rank that finds a reason does not take back what it has added to its gate",
    "publishes before it opens": "a rank tells of the op first, and opens it then",
    "publishes in part": "the first block may fail when it has told some ranks of the op, and not all",
    "touches on some words": "a block moves without the word of one of the ranks",
    "gives up silently": "a rank that gives up stores no reason into its peers' gates",
    "returns at once": "a rank that gives up does not wait for those whose gates say that they are inside",
    "waits for first blocks": "a rank that gives up waits for the first block of each peer only",
    "reads before it closes": "a rank that gives up reads a peer's gate first, and stores its reason then",
    "reads the word first": "a rank that gives up looks for a peer's word before the first block's `left`",
    "waits before it leaves": "the last block waits for its peers before it tells that it has left",
    "leaves unbroken": "a block that has abandoned the op tells that it has done its part",
    "leaves without a word": "a block that has abandoned an op that its rank has opened does not tell",
    "leaves unopened": "a block leaves an op never opened, by a word that does not count for the op before",
    "looks before it closes": "a block that fails finds the op not opened, and closes the gate then",
    "forgets what it lost": "the last block does not ask the others whether a wait after leaving has expired",
    "ignores signatures": "a rank does not compare what it and its peers run",
}


class Block(NamedTuple):
    """One block: what it does now, and how it leaves."""

    stage: int
    whole: bool = False  # it has moved all it had to
    farewells: int = 0  # peers to whom it has told that it has left
    lost: bool = False  # it has not handed on all that came


class Rank(NamedTuple):
    """One rank: what it does now, and the words that lie in its memory."""

    op: int  # the epoch of the op that it runs, or has still to begin
    told: int  # ranks to whom it has published, itself first
    blocks: tuple[Block, ...]
    giving_up: int  # of the last block, when it has left: 0, or 1 + the steps that it has done
    whole: bool  # it has seen that every block of every rank has left whole
    noted: bool  # the fault "reads the word first": whether the word was there
    gate: int  # the epoch that it opened last, or one more until it has taken that back
    opened: int  # the epoch that it opened last, noted after that
    closed: bool  # a reason lies in the gate
    mailboxes: tuple[int, ...]  # by sender: the epoch last published
    left: tuple[tuple[tuple[int, bool], ...], ...]  # by sender and block: the epoch, whether it was whole
    moved: int  # bit e: all of its blocks have moved all in op e


Ranks = tuple[Rank, ...]
State = tuple[Ranks, int]  # the ranks; the one that has stopped for ever, or -1
Steps = Iterator[tuple[str, Ranks]]


@dataclasses.dataclass(frozen=True)
class Broken:
    """An invariant that does not hold, and the steps that lead there."""

    invariant: str
    steps: list[str]


class Violation(Exception):
    """An invariant does not hold after a step."""


@dataclasses.dataclass(frozen=True)
class Protocol:
    """What is searched: how many blocks each rank has, what it runs, and what is planted.

    `signatures[rank][op]` differ where ranks run different ops.
    """

    blocks: tuple[int, ...]
    ops: int = 1
    signatures: tuple[tuple[str, ...], ...] = ()
    may_stop: int = -1  # the rank that may stop for ever
    spreads: bool = False  # blocks wait for what their peers move after they have left
    fault: str = ""

    @functools.cached_property
    def size(self) -> int:
        return len(self.blocks)

    def start(self) -> State:
        words = ((0,) * self.size, tuple(((0, True),) * blocks for blocks in self.blocks), 0)
        ranks = (Rank(1, 0, self.first_stages(n), 0, False, False, 0, 0, False, *words) for n in self.blocks)
        return tuple(ranks), -1

    def first_stages(self, blocks: int) -> tuple[Block, ...]:
        first = PUBLISHES if self.fault == "publishes before it opens" else OPENS
        return (Block(first), *(Block(WAITS),) * (blocks - 1))

    @functools.cached_property
    def peers(self) -> list[list[int]]:
        """The other ranks of each, in the order in which it turns to them."""
        return [[(rank + i) % self.size for i in range(1, self.size)] for rank in range(self.size)]

    def agree(self, op: int) -> bool:
        return len({ops[op - 1] for ops in self.signatures}) <= 1

    def all_moved(self, rank: Rank, ranks: Ranks) -> bool:
        return all(other.moved >> rank.op & 1 for other in ranks)

    def steps(self, state: State) -> Iterator[tuple[str, State]]:
        """Every step that some rank can take, and where it leads."""
        ranks, stopped = state
        for r, rank in enumerate(ranks):
            if r == stopped or rank.op > self.ops:
                continue
            if r == self.may_stop and stopped < 0:
                yield f"{r} stops for ever", (ranks, r)
            for b in range(len(rank.blocks)):
                for what, changed in self.steps_of_block(r, b, ranks):
                    yield f"{r} {what} (block {b})", (changed, stopped)
            for what, changed in self.steps_to_the_end(r, ranks, stopped):
                yield f"{r} {what}", (changed, stopped)

    def steps_of_block(self, r: int, b: int, ranks: Ranks) -> Steps:
        rank, block = ranks[r], ranks[r].blocks[b]

        def become(stage: int, block_is: dict[str, bool] | None = None, **changes: object) -> Ranks:
            blocks = _with(rank.blocks, b, block._replace(stage=stage, **(block_is or {})))
            return _with(ranks, r, rank._replace(blocks=blocks, **changes))

        def fail() -> Ranks:
            # Closes the gate; from then on it is settled whether the op is opened.
            if self.fault == "looks before it closes":
                return become(TELLS if rank.opened == rank.op else CLOSES)
            return become(TELLS, closed=True)

        if block.stage == OPENS:
            if self.fault == "opens in two steps":
                yield "reads its gate", become(TELLS if rank.closed else OPENS_LATE)
            else:
                # One access: it adds to the epoch, and finds whether a reason was below.
                yield "adds to its gate", become(TAKES_BACK if rank.closed else NOTES, gate=rank.gate + 1)
        elif block.stage == OPENS_LATE:
            yield "adds to its gate", become(NOTES, gate=rank.gate + 1)
        elif block.stage == TAKES_BACK:
            gate = rank.gate - (self.fault != "keeps what it added")
            yield "takes back what it has added", become(TELLS, gate=gate)
        elif block.stage == NOTES:
            yield "notes that the op is opened", become(WAITS if rank.told else PUBLISHES, opened=rank.op)
        elif block.stage == PUBLISHES:
            if rank.told == 0 or self.fault == "publishes in part":
                yield "fails", fail()
            to = (r + rank.told) % self.size
            opens_now = self.fault == "publishes before it opens"
            after = PUBLISHES if rank.told + 1 < self.size else OPENS if opens_now else WAITS
            changed = become(after, told=rank.told + 1)
            mailboxes = _with(changed[to].mailboxes, r, rank.op)
            yield f"publishes to {to}", _with(changed, to, changed[to]._replace(mailboxes=mailboxes))
        elif block.stage == WAITS:
            needed = [r, *self.peers[r]]
            if self.fault == "touches on some words":
                needed.pop()
            alike = self.agree(rank.op) or self.fault == "ignores signatures"
            if alike and all(rank.mailboxes[p] == rank.op for p in needed):
                yield "sees all words", become(MOVES)
            yield "fails", fail()  # also where it refuses what the words say
        elif block.stage == CLOSES:
            yield "closes its gate", become(ENDED, closed=True)
        elif block.stage == MOVES:
            moved = rank.moved
            if all(other.whole for i, other in enumerate(rank.blocks) if i != b):
                moved |= 1 << rank.op
            yield "has moved", become(TELLS, {"whole": True}, moved=moved)
            yield "gives up moving", become(TELLS, closed=True)
        elif block.stage == TELLS:
            yield from self.steps_of_leaving(r, b, ranks)
        elif block.stage == SPREADS:
            if self.all_moved(rank, ranks):
                yield "hands all on", become(ENDED)
            else:
                yield "waits no longer", become(ENDED, {"lost": True}, closed=True)

    def steps_of_leaving(self, r: int, b: int, ranks: Ranks) -> Steps:
        """A block tells its peers one after the other that it is done with their memory."""
        rank, block, peers = ranks[r], ranks[r].blocks[b], self.peers[r]
        waits_first = self.fault == "waits before it leaves" and b == len(rank.blocks) - 1
        if waits_first and not block.whole and rank.opened == rank.op and rank.giving_up <= 2 * len(peers):
            return
        opened = rank.opened == rank.op or self.fault == "leaves unopened"
        if not opened and rank.gate != rank.opened:
            return  # it waits for the first block to note it, or to take it back
        if not opened or (self.fault == "leaves without a word" and not block.whole):
            blocks = _with(rank.blocks, b, block._replace(stage=ENDED))
            yield "tells nobody", _with(ranks, r, rank._replace(blocks=blocks))
            return
        to = peers[block.farewells]
        done = SPREADS if self.spreads and block.whole else ENDED
        after = done if block.farewells + 1 == len(peers) else TELLS
        changed = _with(rank.blocks, b, block._replace(stage=after, farewells=block.farewells + 1))
        word = (rank.op, block.whole or self.fault == "leaves unbroken")
        left = _with(ranks[to].left, r, _with(ranks[to].left[r], b, word))
        ranks = _with(ranks, r, rank._replace(blocks=changed))
        yield f"tells {to} that it has left", _with(ranks, to, ranks[to]._replace(left=left))

    def steps_to_the_end(self, r: int, ranks: Ranks, stopped: int) -> Steps:
        """What the last block does when it has left itself, while others of its rank may still be at work."""
        rank, peers = ranks[r], self.peers[r]
        waits_first = self.fault == "waits before it leaves" and rank.blocks[-1].stage == TELLS
        if rank.blocks[-1].stage != ENDED and not (waits_first and rank.opened == rank.op):
            return
        ended = all(block.stage == ENDED for block in rank.blocks)
        if rank.giving_up == 0:
            words = [(ranks[p].moved >> rank.op & 1, left) for p in peers for left in rank.left[p]]
            left = all(left == (rank.op, True) or (moved and left[0] > rank.op) for moved, left in words)
            own = all(block.whole and block.farewells == len(peers) for block in rank.blocks)
            lost = any(block.lost for block in rank.blocks)
            if rank.whole and ended and (not lost or self.fault == "forgets what it lost"):
                if not self.all_moved(rank, ranks) or lost:
                    raise Violation(f"I2: {r} reports success without all data")
                yield "succeeds", _with(ranks, r, self.ended(rank))
            elif not rank.whole and left and own:
                yield "sees that all have left", _with(ranks, r, rank._replace(whole=True))
            if not rank.whole or (ended and lost):
                yield "gives up", _with(ranks, r, rank._replace(giving_up=1, closed=True))
        elif rank.giving_up <= 2 * len(peers) and (rank.opened == rank.op or rank.giving_up <= len(peers)):
            yield from self.steps_of_giving_up(r, ranks, stopped)
        elif ended:
            yield "returns an error", _with(ranks, r, self.ended(rank))

    def steps_of_giving_up(self, r: int, ranks: Ranks, stopped: int) -> Steps:
        """Every peer's gate is closed; then, if this rank has opened, those are waited for that have too."""
        rank, peers = ranks[r], self.peers[r]
        step = rank.giving_up - 1
        closes = step < len(peers)
        if self.fault == "reads before it closes" and rank.opened == rank.op:
            closes = not closes
        to = peers[step % len(peers)]
        changed = _with(ranks, r, rank._replace(giving_up=rank.giving_up + 1, noted=False))
        if closes:
            closed = changed[to].closed or self.fault != "gives up silently"
            yield f"closes the gate of {to}", _with(changed, to, changed[to]._replace(closed=closed))
            return
        latest = rank.op if self.fault == "leaves unopened" else rank.op + 1
        has_left = [rank.op <= word[0] <= latest for word in rank.left[to]]
        has_word = rank.mailboxes[to] == rank.op
        if self.fault == "reads the word first":
            if not rank.noted and not has_word:
                yield f"notes that {to} has told nothing", _with(ranks, r, rank._replace(noted=True))
            has_word = not rank.noted
        # A closed gate opens no more, and `left` of the first block comes after the word: one step reads all.
        # The next epoch in it may be of an op that is never opened.
        is_out = ranks[to].gate not in (rank.op, rank.op + 1) or to == stopped or all(has_left)
        if self.fault == "waits for first blocks" or not has_word:
            is_out |= has_left[0]
        if is_out or self.fault == "returns at once":
            yield f"knows that {to} is out", changed

    def ended(self, rank: Rank) -> Rank:
        """The rank after the op, whose memory it has freed."""
        blocks = self.first_stages(len(rank.blocks))
        return rank._replace(op=rank.op + 1, told=0, blocks=blocks, giving_up=0, whole=False, noted=False)

    def check(self, state: State) -> None:
        """Raises Violation if a block touches what it must not."""
        ranks, stopped = state
        for r, rank in enumerate(ranks):
            if r == stopped or all(block.stage != MOVES for block in rank.blocks):
                continue
            if not self.agree(rank.op):
                raise Violation(f"I4: {r} moves though the signatures differ")
            for p in self.peers[r]:
                if ranks[p].op != rank.op or ranks[p].told <= self.peers[p].index(r) + 1:
                    raise Violation(f"I1: {r} touches the memory of {p} in op {rank.op}")


def _with(values: tuple, index: int, value: object) -> tuple:
    return (*values[:index], value, *values[index + 1 :])


def search(protocol: Protocol) -> tuple[int, Broken | None]:
    """The number of states, and the first violation that was found, by a shortest way."""
    start = protocol.start()
    came_from: dict[State, tuple[State, str] | None] = {start: None}
    layer = [start]

    def broken(state: State, invariant: str) -> Broken:
        steps = []
        while (origin := came_from[state]) is not None:
            state, what = origin
            steps.append(what)
        return Broken(invariant, steps[::-1])

    while layer:
        following = []
        for state in layer:
            stuck = True
            try:
                protocol.check(state)
                for what, reached in protocol.steps(state):
                    stuck = stuck and "stops" in what
                    if reached not in came_from:
                        came_from[reached] = (state, what)
                        following.append(reached)
            except Violation as violation:
                return len(came_from), broken(state, str(violation))
            ranks, stopped = state
            waiting = [r for r, rank in enumerate(ranks) if r != stopped and rank.op <= protocol.ops]
            if stuck and waiting:
                return len(came_from), broken(state, f"I3: {waiting} wait for ever")
        layer = following
    return len(came_from), None
