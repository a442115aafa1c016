"""Faults of one process that drives all devices. Each case yields a line for each of its parts."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import fault_masks
import fault_mismatch
import jax
import numpy as np
from fault_canaries import Canaries
from fault_rig import (
    FEW,
    FEW_ENOUGH_FOR_SLOTS,
    SEVERAL_WAVES,
    SLACK_S,
    Program,
    Rig,
    attempt,
    checked,
    fetch_or_none,
    require,
    require_named,
)
from jax.sharding import Mesh

import jax_ep

Part = tuple[str, int, Callable[[], str]]  # its name, how often it is repeated, what makes one repeat


class Seen:
    """What the repeats of a part have in common."""

    def __init__(self) -> None:
        self.verdicts: Counter[str] = Counter()
        self.longest_s = 0.0
        self.canary_bytes = 0
        self.reused: list[float] = []
        self.text = ""

    def __str__(self) -> str:
        parts = [", ".join(f"{count} {verdict}" for verdict, count in sorted(self.verdicts.items()))]
        if self.longest_s:
            parts.append(f"error within {self.longest_s:.2f} s")
        if self.reused:
            parts.append(f"{self.canary_bytes / 2**20:.0f} MiB of canaries")
            parts.append(f"{100 * float(np.mean(self.reused)):.0f} % of the freed memory reused")
        if self.text:
            parts.append(f"{self.text[:200]!r}")
        return "; ".join(part for part in parts if part)


def tokens_of(rig: Rig, how: str = "inside") -> int:
    number = rig.rng.random()
    # Nobody waits for a rank that is inside of an op of few tokens, and two such ops cannot run concurrently.
    if how != "inside" and not rig.style.concurrent and number > 0.6:
        return FEW_ENOUGH_FOR_SLOTS
    return SEVERAL_WAVES if rig.on_gpus and number < 0.25 else FEW


def keep_waiting(rig: Rig, how: str) -> tuple[int, float]:
    """Holds a rank up from its next op on; which one, and for how long. On the CPU the program does it."""
    inside = how == "inside"
    # A rank that stays inside longer than twice the time-out is another case: it stops the GPU.
    seconds = rig.timeout_s * float(rig.rng.uniform(1.2, 1.7) if inside else rig.rng.uniform(1.5, 4))
    rank = rig.size - 1 if how == "busy" else int(rig.rng.integers(rig.size))
    if rig.on_gpus and how == "busy":
        rig.keep_busy(seconds)
    elif rig.on_gpus:
        rig.stall(rank, 2 if inside else 1, seconds)
    return rank, seconds


def late_once(rig: Rig, program: Program, how: str, seen: Seen) -> None:
    """A rank comes late, or stays inside; the others give up, and their memory is used again at once."""
    ready = program.run(0)  # results of an earlier step, to be left behind in memory
    jax.block_until_ready(ready)
    del ready
    late, seconds = keep_waiting(rig, how)
    begin = time.monotonic()
    shards = rig.launch(program, 1, {late: seconds})
    early = [rank for rank in rig.local if rank != late]
    found = {rank: fetch_or_none(shards[rank]) for rank in early}
    took = time.monotonic() - begin
    # A sum by NCCL in the same program holds it until the late rank has come, who is held up in each of its
    # ops; XLA:CPU lets the devices of a program end together.
    together = seconds * program.num_ops if rig.style.nccl else 0 if rig.on_gpus else seconds
    allowed = max(2 * rig.timeout_s, together) + SLACK_S
    text = checked(rig.group)
    rig.end_stalls()
    canaries = Canaries(rig.rng)
    for rank in early:
        if found[rank] is not None:
            canaries.note(shards[rank])
        del shards[rank]
    canaries.sing(program.temporary_bytes)
    if canaries.freed:
        seen.reused.append(canaries.reused())
    # The next group may be made while the rank is still late; then it is waited for there.
    impatient = rig.on_gpus and bool(rig.rng.random() < 0.25)
    if impatient:
        rig.regroup()
    found[late] = fetch_or_none(shards.pop(late))
    canaries.require_unchanged()
    seen.canary_bytes += canaries.bytes

    verdicts = {rank: program.judge(1, rank, leaves) for rank, leaves in found.items()}
    seen.verdicts.update(verdicts.values())
    seen.longest_s, seen.text = max(seen.longest_s, took), text
    if rig.style.nccl and set(verdicts.values()) == {"right"} and not text:
        return  # the sum came before the op, so that all came late together
    require(any(verdicts[rank] != "right" for rank in early), f"no rank gave up in {took:.2f} s")
    require(took <= allowed, f"the others gave up after {took:.2f} s, more than {allowed:.2f}")
    require(text != "", "group.check() knows of nothing")
    ops = [program.op] if program.op != "gradient" else []
    require_named(text, ops, [late])
    if rig.on_gpus and not impatient:
        require_named(attempt(lambda: program.run(0)), ops, [late])
    if not impatient:
        rig.regroup()
    program.require_right(int(rig.rng.integers(2)))


def late(rig: Rig, repeats: int, kinds: list[str], ways: tuple[str, ...]) -> Iterator[Part]:
    for kind in kinds:
        seen = Seen()

        def once(kind: str = kind, seen: Seen = seen) -> str:
            how = str(rig.rng.choice(ways))
            late_once(rig, rig.program(kind, tokens_of(rig, how)), how, seen)
            if rig.on_gpus and len(seen.reused) >= 10:
                require(max(seen.reused) > 0, "no canary lies where results lay: nothing is shown")
            return str(seen)

        yield kind, repeats, once


def mismatch(rig: Rig, repeats: int) -> Iterator[Part]:
    for what in fault_mismatch.PAIRS:
        for how in fault_mismatch.WAYS if rig.on_gpus else ("in another channel",):
            seen = Seen()
            # Each first call takes a program of its own, which is compiled in the time of several repeats.
            is_first = how.endswith(fault_mismatch.FIRST)
            count = max(1, repeats // 5) if is_first else repeats
            pair: list[Any] = []

            def once(
                what: str = what,
                how: str = how,
                is_first: bool = is_first,
                seen: Seen = seen,
                pair: list[Any] = pair,
            ) -> str:
                if not pair or is_first:
                    pair[:] = [fault_mismatch.Pair(rig, what, how).prepare(how)]
                took, text, canaries = pair[0].run_mixed(how)
                seen.longest_s, seen.text = max(seen.longest_s, took), text
                seen.verdicts["refused"] += 1
                seen.canary_bytes += canaries.bytes
                seen.reused.append(canaries.reused() if canaries.freed else 0.0)
                canaries.require_unchanged()
                rig.regroup()
                if not is_first:
                    pair[0].require_right()
                return str(seen)

            yield f"{what}, {how}", count, once


def second(rig: Rig, repeats: int, kinds: list[str]) -> Iterator[Part]:
    """Other groups of the same devices are made and closed while ops run."""
    made = 0
    stop, errors = threading.Event(), []

    def make_groups() -> None:
        nonlocal made
        rng = np.random.default_rng(1)
        while not stop.is_set():
            devices = rig.mesh.devices if rng.random() < 0.3 else rig.mesh.devices[::-1]
            name = str(rng.choice(["ep", "a", "b"]))  # few: what a group takes is kept as long as the process
            try:
                with jax_ep.Group(Mesh(devices, (name,)), name, timeout_s=rig.timeout_s) as group:
                    group.check()
                made += 1
            except Exception as error:
                errors.append(error)
                return

    for kind in kinds:

        def once(kind: str = kind) -> str:
            program, before = rig.program(kind, tokens_of(rig)), made
            thread = threading.Thread(target=make_groups)
            stop.clear()
            thread.start()
            try:
                deadline = time.monotonic() + 5
                for i in range(1000):
                    program.require_right(i % 2)
                    if (made > before + 1 and i >= 3) or errors or time.monotonic() > deadline:
                        break
            finally:
                stop.set()
                thread.join(60)
            require(not errors, f"a group could not be made: {errors}")
            require(not thread.is_alive(), "a group was not made within a minute")
            rig.group.check()
            return f"{made} groups made"

        yield kind, repeats, once


def delete(rig: Rig, repeats: int, kinds: list[str]) -> Iterator[Part]:
    """Every live array is deleted, while nothing runs or while an op does, and its memory used again."""
    for kind in kinds:
        deleted = 0

        def once(kind: str = kind) -> str:
            nonlocal deleted
            program = rig.program(kind, FEW)
            rig.leave_the_devices()
            results = program.run(0)
            # On the CPU the arrays of the callback that holds a rank up would be deleted with the others.
            in_flight = rig.on_gpus and bool(rig.rng.random() < 0.5)
            if not in_flight:
                jax.block_until_ready(results)
            canaries = Canaries(rig.rng)
            for shards in rig.shards(results).values():
                canaries.note(shards, in_flight)
            rig.leave_the_devices()
            live = jax.live_arrays()
            for array in live:
                array.delete()
            deleted += len(live)
            del results, shards, live
            canaries.sing(program.temporary_bytes)
            for batch in (1, 0):
                program.require_right(batch)
            canaries.require_unchanged()
            rig.group.check()
            return f"{deleted} arrays deleted"

        yield kind, repeats, once


def masked(rig: Rig, repeats: int) -> Iterator[Part]:
    for order in fault_masks.ORDERS if rig.on_gpus else ():  # on the CPU: tests/faults/test_faults_mask.py
        program: list[fault_masks.Masked] = []

        def once(order: str = order, program: list[fault_masks.Masked] = program) -> str:
            if not program:
                program.append(fault_masks.Masked(rig, order))
            return fault_masks.masked_once(program[0])

        yield order, repeats, once


def cases(rig: Rig, repeats: int, kinds: list[str]) -> dict[str, Callable[[], Iterator[Part]]]:
    def patient(parts: Callable[[], Iterator[Part]]) -> Iterator[Part]:
        """Nothing may time out here, on a busy machine neither."""
        with rig.patience(max(10.0, rig.timeout_s)):
            yield from parts()

    return {
        "late": lambda: late(rig, repeats, kinds, ("busy", "stall") if rig.on_gpus else ("sleep",)),
        "inside": lambda: late(rig, repeats, kinds if rig.on_gpus else [], ("inside",)),
        "mismatch": lambda: mismatch(rig, repeats),
        "masked": lambda: masked(rig, repeats),
        "second": lambda: patient(lambda: second(rig, repeats, kinds)),
        "delete": lambda: patient(lambda: delete(rig, repeats, kinds)),
    }
