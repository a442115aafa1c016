"""The protocol between hosts, compiled for the host, over a network that reorders: see hop_stress.cc."""

import pytest
from stress_programs import build, run

pytestmark = pytest.mark.no_jax

EXCHANGE, WAIT, HOP = "kernels/hop/exchange.cuh", "kernels/hop/wait.cuh", "kernels/hop/window.h"
POLL = "kernels/protocol/wait.cuh"

COPIES_OUT = """\
    CopyBlock(hop.out + from * hop.block_bytes + piece.offset, hop.slots + slot + kHopHeadBytes, piece.bytes);
    __syncthreads();
"""
RETURNS_CREDIT = (
    "    if (threadIdx.x == 0) net.Signal(from, window.CreditSignal(piece.track, hop.host), 1);\n"
)

# What is done wrong: (file, what stands there, what takes its place) each.
MISTAKES = {
    "sends without a credit": [(EXCHANGE, "piece.number >= kHopSlots)", "false)")],
    "sends on a credit too few": [(EXCHANGE, "piece.number - kHopSlots + 1", "piece.number - kHopSlots")],
    "counts pieces that overtake each other": [
        (
            HOP,
            "return First(track, host) + static_cast<uint32_t>(number % kHopSlots)",
            "return First(track, host)",
        ),
        (EXCHANGE, "piece.number / kHopSlots + 1", "piece.number + 1"),
    ],
    "puts what is not written yet": [
        (
            EXCHANGE,
            "    __syncthreads();\n    if (threadIdx.x == 0) {\n      net.Put",
            "    if (threadIdx.x == 0) {\n      net.Put",
        )
    ],
    "returns the credit early": [(EXCHANGE, COPIES_OUT + RETURNS_CREDIT, RETURNS_CREDIT + COPIES_OUT)],
    "returns the credit for its own thread": [
        (
            EXCHANGE,
            COPIES_OUT + RETURNS_CREDIT,
            COPIES_OUT.replace("    __syncthreads();\n", "") + RETURNS_CREDIT,
        )
    ],
    "takes any op's pieces": [(EXCHANGE, "if (call == piece.call) return true;", "return true;")],
    "takes pieces of another list": [(EXCHANGE, "hop.call ^ list", "hop.call")],
    "lags too far": [(EXCHANGE, "kHopLag = kHopSlots - 1", "kHopLag = kHopSlots")],
    "forgets how far it is": [
        (EXCHANGE, "if (alive) track.pieces = first", "if (false) track.pieces = first")
    ],
    "gives up silently": [(WAIT, "if (atomicExch(&track.notified, 1u) != 0) return;", "return;")],
    "waits for ever": [(WAIT, "clock.IsUp(hop.timeout_ns)", "false")],
    "leaves rows of a hop that failed": [(EXCHANGE, "FillResult(hop.out", "if (false) FillResult(hop.out")],
    "clears what its track failed of only": [
        (EXCHANGE, "threadIdx.x == 0 && LoadRelaxed(&hop.state->reason) != 0", "!alive")
    ],
    "goes on after a failure": [
        (EXCHANGE, "uint64_t reason = FindOwnReason(hop);", "uint64_t reason = 0;"),
        (WAIT, "FindOwnReason(hop);\n  if (known != 0) return known;", "FindOwnReason(hop);"),
    ],
    "lets its host go on": [
        (
            WAIT,
            "CloseGate(peers, Reason::Of(peers.rank, is_on_other_mesh ? Phase::kRank : Phase::kHop, 0))",
            "true",
        )
    ],
    "does not tell its host of another mesh": [
        (WAIT, "is_on_other_mesh ? Phase::kRank : Phase::kHop", "Phase::kHop")
    ],
    "looks not again when time is up": [
        (POLL, "if (gives_up()) return ready();", "if (gives_up()) return false;")
    ],
    "sends on what its host has failed of": [
        (WAIT, "(hop.peers.num_ranks != 0 && IsGivenUp(hop.peers))", "false")
    ],
    "moves rows of a hop that is refused": [(WAIT, "hop.is_refused ||", "false ||")],
    "counts all waits together": [(WAIT, "  HopClock clock;", "  __shared__ HopClock clock;")],
    "wears out": [(EXCHANGE, "> hop.max_pieces", "> ~uint64_t{0}")],
    "shares a track": [(EXCHANGE, "if (reason == 0 && is_busy)", "if (false)")],
}

# Where to begin, if the first scenario that shows a mistake is late.
FIRST_SEEDS = {
    "returns the credit early": 240,
    "returns the credit for its own thread": 1120,
    "clears what its track failed of only": 160,
    "shares a track": 105,
}


@pytest.mark.slow
def test_hop(tmp_path):
    done = run(build("hop_stress", tmp_path / "hop_stress"), "300", "1")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("mistake", MISTAKES)
def test_each_planted_mistake_is_found(mistake, tmp_path, build_with_mistake):
    program = build_with_mistake("hop_stress", MISTAKES[mistake], tmp_path)
    done = run(program, "1500", str(FIRST_SEEDS.get(mistake, 1)))
    assert done.returncode == 1, done.stdout
    assert "hop_stress: seed" in done.stderr
