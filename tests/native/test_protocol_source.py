"""The device protocol's own source, compiled for the host and run with faults.

See protocol_stress.cc, and arena_stress.cc for ops that go through the arena.
"""

import pytest
from stress_programs import build

pytestmark = pytest.mark.no_jax

WAIT, WAVES = "kernels/protocol/wait.cuh", "kernels/protocol/waves.cuh"
CHUNK, ARENA = "kernels/few_tokens/chunk.cuh", "kernels/protocol/arena.h"
SESSION, ARENA_SESSION = "kernels/protocol/session.cuh", "kernels/protocol/arena_session.cuh"
SCALE, PULL = "kernels/push/scale_by_ring.cuh", "kernels/pull/by_ring.cuh"
RANK_SET = "kernels/protocol/rank_set.h"
SOURCES, OPENING = "kernels/pull/sources.cuh", "kernels/protocol/opening.cuh"

# Planted mistakes: the fault that shows each, and (file, right, with the mistake) for each change.
MISTAKES = {
    "frees the channel before all blocks have ended": (
        "tail",
        [
            (
                SESSION,
                "ended % kFailed == gridDim.x,",
                "(PLANTED ? ended % kFailed >= gridDim.x - 1 : ended % kFailed == gridDim.x),",
            )
        ],
    ),
    "sends a batch that belongs to two waves": (
        "short",
        [
            (
                WAVES,
                "Cut(waves.First(shape, wave) + i * tokens, waves.First(shape, wave + 1),",
                "PLANTED ? Cut(number * tokens, shape.num_tokens, shape.num_tokens) : "
                "Cut(waves.First(shape, wave) + i * tokens, waves.First(shape, wave + 1),",
            )
        ],
    ),
    "forgets that it has missed a wave": (
        "gate",
        [
            (
                SESSION,
                "missing});\n        state_of_block().has_failed = true;",
                "missing});\n        if (!PLANTED) state_of_block().has_failed = true;",
            )
        ],
    ),
    "ends with a request for a ticket in flight": (
        "overlap",
        [(SCALE, "  TicketCounter::Settle(requested);", "  if (!PLANTED) TicketCounter::Settle(requested);")],
    ),
    "frees the channel before its counters are reset": (
        "overlap",
        [
            (
                SESSION,
                "StoreReleaseOnDevice(EndedWord(own), Pack(0, epoch));",
                "PLANTED ? StoreWord(EndedWord(own), 0, epoch)"
                " : StoreReleaseOnDevice(EndedWord(own), Pack(0, epoch));",
            )
        ],
    ),
    "pulls sums that are not folded yet": (
        "short",
        [(PULL, "in_time = session.AwaitWave", "in_time = PLANTED || session.AwaitWave")],
    ),
}
# Mistakes with more ranks than a warp has lanes.
MANY_MISTAKES = {
    "logs that ranks came when it looked": [
        (SESSION, "nullptr && R <= kWarp;", "nullptr && (PLANTED || R <= kWarp);")
    ],
    "waits for the first ranks of a wave only": [
        (
            SESSION,
            "first < peers_.num_ranks && missing",
            "first < (PLANTED ? 1 : peers_.num_ranks) && missing",
        )
    ],
    "pulls no sum of several rows": [(SOURCES, "0)), row, row < 0};", "0)), row, !PLANTED && row < 0};")],
}
# Where to begin, if the first scenario that shows a mistake is late.
FIRST_SEEDS = {"ends with a request for a ticket in flight": 800}
ARENA_MISTAKES = {
    "does not look again when time is up": (
        "held",
        [(WAIT, "if (gives_up()) return ready();", "if (gives_up()) return !PLANTED && ready();")],
    ),
    "decides in each warp which ranks it may write to": (
        "long",
        [
            (
                ARENA_SESSION,
                "writable_ = state.writable;",
                "writable_ = state.writable; uint32_t heard[kRankWords]; "
                "for (int w = 0; w < kRankWords; ++w) heard[w] = "
                "ArenaOf(peers_, peers_.rank).heard[w * kRankBits + threadIdx.x % kWarp]; "
                "if (PLANTED) writable_ = FindWritable(epoch_, ranks_, heard);",
            )
        ],
    ),
    "uses one half": (
        "short",
        [(ARENA_SESSION, "mailbox(source, number)", "mailbox(source, PLANTED ? 0 : number)")],
    ),
    "takes a chunk when its first line is there": (
        "late",
        [(CHUNK, "have &= lines[i].w == epoch", "have &= (PLANTED && i == 1) || lines[i].w == epoch")],
    ),
    "stores lines in one half": (
        "short",
        [(ARENA, "+ half) * region", "+ (PLANTED ? 0 : half)) * region")],
    ),
    "takes the verdict of any op": (
        "late",
        [
            (
                ARENA_SESSION,
                "there &= HasEpoch(word, epoch());",
                "there &= PLANTED ? word != 0 : HasEpoch(word, epoch());",
            )
        ],
    ),
    "writes to a rank that it has not heard of": (
        "short",
        [(ARENA_SESSION, "ranks.words[w] & ~__ballot", "PLANTED ? 0 : ranks.words[w] & ~__ballot")],
    ),
    "counts the ended blocks of several ops together": (
        "late",
        [
            (SESSION, "if (end.is_last) own.ended = 0;", "if (end.is_last && !PLANTED) own.ended = 0;"),
            (
                SESSION,
                "ended % kFailed == gridDim.x,",
                "(PLANTED ? ended % kFailed % gridDim.x == 0 : ended % kFailed == gridDim.x),",
            ),
        ],
    ),
    "goes on in a channel that another op holds": (
        "stray",
        [(OPENING, "return holder_ == 0 ||", "return PLANTED || holder_ == 0 ||")],
    ),
    "goes on without its own rows": (
        "two",
        [(ARENA_SESSION, "misses_own = missed", "misses_own = !PLANTED && missed")],
    ),
}
# Mistakes with more ranks than a word has bits.
MANY_ARENA_MISTAKES = {
    "takes all ranks for those of the first word": [
        (RANK_SET, "index == i ? words[i] : word", "index == i && !PLANTED ? words[i] : word")
    ],
    "notes ranks that it has missed in the first word": [
        (ARENA_SESSION, "missed.words[r / kRankBits]", "missed.words[PLANTED ? 0 : r / kRankBits]")
    ],
    "decides for the ranks of the first word": [
        (
            ARENA_SESSION,
            "state.ranks = came ? seen : Ranks{};",
            "state.ranks = came ? seen : Ranks{}; "
            "for (int w = 1; PLANTED && w < kRankWords; ++w) state.ranks.words[w] = ranks().words[w];",
        )
    ],
}


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    mistakes = {name: changes for name, (_, changes) in MISTAKES.items()}
    return build("protocol_stress", tmp_path_factory.mktemp("protocol"), mistakes | MANY_MISTAKES)


@pytest.fixture(scope="module")
def arena_program(tmp_path_factory):
    mistakes = {name: changes for name, (_, changes) in ARENA_MISTAKES.items()}
    return build("arena_stress", tmp_path_factory.mktemp("arena"), mistakes | MANY_ARENA_MISTAKES)


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [("faults", "32", "1"), ("held", "30", "1"), ("plain", "1000", "2"), ("many", "1", "1", "40")],
    ids=lambda a: a[0],
)
def test_protocol(program, arguments):
    done = program.run(*arguments)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments", [("faults", "300", "1"), ("plain", "800", "2"), ("many", "12", "1")], ids=lambda a: a[0]
)
def test_arena_protocol(arena_program, arguments):
    done = arena_program.run(*arguments)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("mistake", MISTAKES)
def test_protocol_finds_planted_mistake(mistake, program):
    first, fault = FIRST_SEEDS.get(mistake, 1), MISTAKES[mistake][0]
    done = program.run("faults", "1000", str(first), fault, mistake=mistake)
    assert done.returncode == 1, done.stdout
    assert "protocol_stress: seed" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("mistake", MANY_MISTAKES)
def test_protocol_finds_mistake_with_many_ranks(mistake, program):
    done = program.run("many", "1", "1", "40", mistake=mistake)
    assert done.returncode == 1, done.stdout
    assert "protocol_stress: seed" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("mistake", ARENA_MISTAKES)
def test_arena_protocol_finds_planted_mistake(mistake, arena_program):
    fault = ARENA_MISTAKES[mistake][0]
    done = arena_program.run("faults", "1000", "1", fault, mistake=mistake)
    assert done.returncode == 1, done.stdout
    assert "arena_stress: seed" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("mistake", MANY_ARENA_MISTAKES)
def test_arena_protocol_finds_mistake_with_many_ranks(mistake, arena_program):
    done = arena_program.run("many", "12", "1", mistake=mistake)
    assert done.returncode == 1, done.stdout
    assert "arena_stress: seed" in done.stderr
