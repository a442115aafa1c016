"""The device protocol's own source, compiled for the host and run with faults.

See protocol_stress.cc, and arena_stress.cc for ops that go through the arena.
"""

import pytest
from stress_programs import build, run

pytestmark = pytest.mark.no_jax

WAIT, WAVES = "kernels/protocol/wait.cuh", "kernels/protocol/waves.cuh"
SESSION, ARENA_SESSION = "kernels/protocol/session.cuh", "kernels/protocol/arena_session.cuh"
SCALE, PULL = "kernels/push/scale_by_ring.cuh", "kernels/pull/by_ring.cuh"

# Planted mistakes: the fault that shows each, and (file, right, wrong) for each change.
MISTAKES = {
    "frees the channel before all blocks have ended": (
        "tail",
        [(SESSION, "ended % kFailed == gridDim.x,", "ended % kFailed >= gridDim.x - 1,")],
    ),
    "sends a batch that belongs to two waves": (
        "short",
        [
            (
                WAVES,
                "Cut(waves.First(shape, wave) + i * tokens, waves.First(shape, wave + 1),",
                "(void)i, Cut(number * tokens, shape.num_tokens,",
            )
        ],
    ),
    "forgets that it has missed a wave": (
        "gate",
        [
            (
                SESSION,
                "Phase::kWave, epoch(), missing);\n      state_of_block().has_failed = true;",
                "Phase::kWave, epoch(), missing);",
            )
        ],
    ),
    "ends with a request for a ticket in flight": (
        "overlap",
        [(SCALE, "  TicketCounter::Settle(requested);", "  (void)requested;")],
    ),
    "frees the channel before its counters are reset": (
        "overlap",
        [
            (
                SESSION,
                "StoreReleaseOnDevice(EndedWord(own), Pack(0, epoch));",
                "StoreWord(EndedWord(own), 0, epoch);",
            )
        ],
    ),
    "pulls sums that are not folded yet": (
        "short",
        [(PULL, "in_time = session.AwaitWave(awaited_wave);", "in_time = true;")],
    ),
}
# Where to begin, if the first scenario that shows a mistake is late.
FIRST_SEEDS = {"ends with a request for a ticket in flight": 25}
ARENA_MISTAKES = {
    "does not look again when time is up": (
        "held",
        [(WAIT, "if (gives_up()) return ready();", "if (gives_up()) return false;")],
    ),
    "decides in each warp which ranks it may write to": (
        "long",
        [
            (
                ARENA_SESSION,
                "writable_ = state.writable;",
                "writable_ = FindWritable(epoch_, ranks_, "
                "ArenaOf(peers_, peers_.rank).heard[threadIdx.x % kArenaRanks]);",
            )
        ],
    ),
    "uses one half": ("short", [(ARENA_SESSION, "heads[number]", "heads[0]")]),
    "takes the verdict of any op": (
        "late",
        [
            (
                ARENA_SESSION,
                "HasEpoch(seen = LoadAcquire(verdict), epoch())",
                "(seen = LoadAcquire(verdict)) != 0",
            )
        ],
    ),
    "writes to a rank that it has not heard of": (
        "short",
        [(ARENA_SESSION, "ranks & ~__ballot_sync(kAllLanes, was_heard);", "0;")],
    ),
    "counts the ended blocks of several ops together": (
        "late",
        [
            (SESSION, "if (end.is_last) own.ended = 0;", ""),
            (SESSION, "ended % kFailed == gridDim.x,", "ended % kFailed % gridDim.x == 0,"),
        ],
    ),
    "goes on in a channel that another op holds": (
        "stray",
        [(SESSION, "return holder_ == 0 || holder_ == peers.call.site + 1;", "return true;")],
    ),
    "goes on without its own rows": (
        "two",
        [(ARENA_SESSION, "misses_own = (missing >> peers_.rank & 1) != 0;", "misses_own = false;")],
    ),
}


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    return build("protocol_stress", tmp_path_factory.mktemp("protocol") / "protocol_stress")


@pytest.fixture(scope="module")
def arena_program(tmp_path_factory):
    return build("arena_stress", tmp_path_factory.mktemp("arena") / "arena_stress")


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments", [("faults", "32", "1"), ("held", "30", "1"), ("plain", "1000", "2")], ids=lambda a: a[0]
)
def test_protocol(program, arguments):
    done = run(program, *arguments)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [("faults", "300", "1"), ("plain", "800", "2")], ids=lambda a: a[0])
def test_arena_protocol(arena_program, arguments):
    done = run(arena_program, *arguments)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("mistake", MISTAKES)
def test_protocol_finds_planted_mistake(mistake, tmp_path, build_with_mistake):
    fault, changes = MISTAKES[mistake]
    program = build_with_mistake("protocol_stress", changes, tmp_path)
    done = run(program, "faults", "1000", str(FIRST_SEEDS.get(mistake, 1)), fault)
    assert done.returncode == 1, done.stdout
    assert "protocol_stress: seed" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("mistake", ARENA_MISTAKES)
def test_arena_protocol_finds_planted_mistake(mistake, tmp_path, build_with_mistake):
    fault, changes = ARENA_MISTAKES[mistake]
    done = run(build_with_mistake("arena_stress", changes, tmp_path), "faults", "1000", "1", fault)
    assert done.returncode == 1, done.stdout
    assert "arena_stress: seed" in done.stderr
