"""The protocol between domains, compiled for the host, over a network that reorders: see hop_stress.cc."""

import pytest
from stress_programs import build

pytestmark = pytest.mark.no_jax

EXCHANGE, WAIT, HOP = "kernels/hop/exchange.cuh", "kernels/hop/wait.cuh", "kernels/hop/window.h"
POLL = "kernels/protocol/wait.cuh"

COPIES_OUT = """\
    CopyBlock(hop.out + from * hop.block_bytes + piece.offset, hop.slots + slot + kHopHeadBytes, piece.bytes);
    __syncthreads();
"""
RETURNS_CREDIT = "net.Signal(from, window.CreditSignal(piece.track, hop.domain), 1);"

# Planted mistakes: (file, right, with the mistake) for each change.
MISTAKES = {
    "sends without a credit": [
        (EXCHANGE, "piece.number >= kHopSlots)", "piece.number >= kHopSlots && !PLANTED)")
    ],
    "sends on a credit too few": [
        (EXCHANGE, "piece.number - kHopSlots + 1", "piece.number - kHopSlots + (PLANTED ? 0 : 1)")
    ],
    "counts pieces that overtake each other": [
        (
            HOP,
            "static_cast<uint32_t>(number % kHopSlots)",
            "static_cast<uint32_t>(PLANTED ? 0 : number % kHopSlots)",
        ),
        (EXCHANGE, "piece.number / kHopSlots + 1", "piece.number / (PLANTED ? 1 : kHopSlots) + 1"),
    ],
    "puts what is not written yet": [
        (
            EXCHANGE,
            "    __syncthreads();\n    if (threadIdx.x == 0) {\n      net.Put",
            "    if (!PLANTED) __syncthreads();\n    if (threadIdx.x == 0) {\n      net.Put",
        )
    ],
    "returns the credit early": [
        (EXCHANGE, COPIES_OUT, f"    if (PLANTED && threadIdx.x == 0) {RETURNS_CREDIT}\n{COPIES_OUT}"),
        (
            EXCHANGE,
            f"if (threadIdx.x == 0) {RETURNS_CREDIT}",
            f"if (threadIdx.x == 0 && !PLANTED) {RETURNS_CREDIT}",
        ),
    ],
    "returns the credit for its own thread": [
        (EXCHANGE, COPIES_OUT, COPIES_OUT.replace("__sync", "if (!PLANTED) __sync"))
    ],
    "takes any op's pieces": [
        (EXCHANGE, "if (call == piece.call) return true;", "if (call == piece.call || PLANTED) return true;")
    ],
    "takes pieces of another list": [(EXCHANGE, "hop.call ^ list", "hop.call ^ (PLANTED ? 0 : list)")],
    "lags too far": [
        (
            EXCHANGE,
            "constexpr int kHopLag = kHopSlots - 1",
            "const int kHopLag = kHopSlots - (PLANTED ? 0 : 1)",
        )
    ],
    "forgets how far it is": [
        (EXCHANGE, "if (alive) track.pieces = first", "if (alive && !PLANTED) track.pieces = first")
    ],
    "gives up silently": [
        (
            WAIT,
            "if (atomicExch(&track.notified, 1u) != 0)",
            "if (PLANTED || atomicExch(&track.notified, 1u) != 0)",
        )
    ],
    "waits for ever": [(WAIT, "clock.IsUp(hop.timeout_ns)", "!PLANTED && clock.IsUp(hop.timeout_ns)")],
    "leaves rows of a hop that failed": [
        (EXCHANGE, "FillResult(hop.out", "if (!PLANTED) FillResult(hop.out")
    ],
    "clears what its track failed of only": [
        (
            EXCHANGE,
            "threadIdx.x == 0 && LoadRelaxed(&hop.state->reason) != 0",
            "PLANTED ? !alive : threadIdx.x == 0 && LoadRelaxed(&hop.state->reason) != 0",
        )
    ],
    "goes on after a failure": [
        (
            EXCHANGE,
            "uint64_t reason = FindOwnReason(hop);",
            "uint64_t reason = PLANTED ? 0 : FindOwnReason(hop);",
        ),
        (
            WAIT,
            "FindOwnReason(hop);\n  if (known != 0) return known;",
            "FindOwnReason(hop);\n  if (known != 0 && !PLANTED) return known;",
        ),
    ],
    "lets its domain go on": [
        (
            WAIT,
            "CloseGate(peers, Reason::Of(peers.rank, is_on",
            "PLANTED || CloseGate(peers, Reason::Of(peers.rank, is_on",
        )
    ],
    "does not tell its domain of another mesh": [
        (WAIT, "is_on_other_mesh ? Phase::kRank", "is_on_other_mesh && !PLANTED ? Phase::kRank")
    ],
    "looks not again when time is up": [
        (POLL, "if (gives_up()) return ready();", "if (gives_up()) return !PLANTED && ready();")
    ],
    "sends on what its domain has failed of": [
        (WAIT, "(hop.peers.num_ranks != 0 && IsGivenUp", "(!PLANTED && hop.peers.num_ranks != 0 && IsGivenUp")
    ],
    "moves rows of a hop that is refused": [(WAIT, "hop.is_refused ||", "(hop.is_refused && !PLANTED) ||")],
    "counts all waits together": [
        (
            WAIT,
            "  HopClock clock;",
            "  __shared__ HopClock of_all;\n  HopClock of_one, &clock = PLANTED ? of_all : of_one;",
        )
    ],
    "wears out": [(EXCHANGE, "> hop.max_pieces", "> (PLANTED ? ~uint64_t{0} : hop.max_pieces)")],
    "shares a track": [(EXCHANGE, "if (reason == 0 && is_busy)", "if (reason == 0 && is_busy && !PLANTED)")],
}

# Where to begin, if the first scenario that shows a mistake is late.
FIRST_SEEDS = {
    "returns the credit early": 240,
    "returns the credit for its own thread": 1120,
    "clears what its track failed of only": 160,
    "shares a track": 105,
}


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    return build("hop_stress", tmp_path_factory.mktemp("hop"), MISTAKES)


@pytest.mark.slow
def test_hop(program):
    done = program.run("300", "1")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("mistake", MISTAKES)
def test_each_planted_mistake_is_found(mistake, program):
    done = program.run("1500", str(FIRST_SEEDS.get(mistake, 1)), mistake=mistake)
    assert done.returncode == 1, done.stdout
    assert "hop_stress: seed" in done.stderr
