"""One of the processes that faults.py starts: `fault_worker.py TASK ADDRESS PROCESSES PROCESS SETTINGS`."""

import faulthandler
import json
import os
import sys
import threading
import time
import traceback

import faults
import numpy as np
from processes import own_gpus

task, address = sys.argv[1:3]
processes, process = map(int, sys.argv[3:5])
settings = json.loads(sys.argv[5])
faults.prepare_environment(faults.parse(["--concurrent"] if settings["style"]["concurrent"] else []))
faulthandler.enable()

import jax  # noqa: E402

if processes > 1:
    jax.distributed.initialize(address, processes, process, local_device_ids=own_gpus()[:1])

import fault_masks  # noqa: E402
from fault_canaries import Canaries  # noqa: E402
from fault_rig import (  # noqa: E402
    FEW,
    KINDS,
    Program,
    Rig,
    Style,
    attempt,
    checked,
    fetch_or_none,
    require,
    require_named,
)
from jax.experimental import multihost_utils  # noqa: E402

import jax_ep  # noqa: E402

TIMEOUT_S = settings["timeout"]
SLACK_S = 2.0


def make_rig() -> Rig:
    devices = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))[: settings["ranks"]]
    return Rig(devices, TIMEOUT_S, Style(**settings["style"]), settings["seed"])


def give_up(
    rig: Rig, programs: list[Program], missing: list[int], wait_s: float, held_up_s: float = 0
) -> str:
    """Runs what cannot succeed; what was seen.

    A process that is itself held up may take longer. It may also find everything done, and know of nothing.
    """
    begin = time.monotonic()
    shards = [rig.launch(program, 1) for program in programs]
    found = [{rank: fetch_or_none(one[rank]) for rank in rig.local} for one in shards]
    took = time.monotonic() - begin
    text = checked(rig.group)
    canaries = Canaries(rig.rng)
    for one, leaves in zip(shards, found, strict=True):
        for rank in rig.local:
            if leaves[rank] is not None:
                canaries.note(one[rank] or [])
    del shards, one
    canaries.sing(max(program.temporary_bytes for program in programs))
    time.sleep(wait_s)  # whoever still writes would by now
    canaries.require_unchanged()
    verdicts = []
    for program, leaves in zip(programs, found, strict=True):
        for rank in rig.local:
            verdicts.append(program.judge(1, rank, leaves[rank]) if program.expected else "error")
    require(took <= max(2 * TIMEOUT_S, held_up_s) + SLACK_S, f"the error came after {took:.2f} s")
    if held_up_s == 0:
        require(any(verdict != "right" for verdict in verdicts), f"nobody gave up in {took:.2f} s")
        require(text != "", "group.check() knows of nothing")
        require_named(text, [], missing)
    return f"{','.join(verdicts)} after {took:.2f} s, {canaries.bytes >> 20} MiB of canaries: {text[:200]!r}"


def be_killed(rig: Rig) -> None:
    """The victim ends before an op or inside it; the others must notice."""
    program = rig.program(KINDS[settings["seed"] % len(KINDS)], FEW)
    multihost_utils.sync_global_devices("all have run")
    if process == settings["victim"]:
        die = threading.Timer(float(rig.rng.uniform(0, 1)), os.kill, (os.getpid(), 9))
        if settings["inside"]:
            rig.stall(process, 2, 60)
            results = program.run(1)
            time.sleep(0.05)  # it is inside
            die.start()
            jax.block_until_ready(results)
        die.start() if not settings["inside"] else None
        time.sleep(60)
    print("seen", give_up(rig, [program], [settings["victim"]], 1.0), flush=True)


def be_left(rig: Rig) -> None:
    """The victim ends, and the others go on without it, first by a time-out, then at once."""
    program = fault_masks.Masked(rig, fault_masks.ORDERS[settings["seed"] % len(fault_masks.ORDERS)])
    multihost_utils.sync_global_devices("all have run")
    if process == settings["victim"]:
        os.kill(os.getpid(), 9)
    others = [rank for rank in range(rig.size) if rank != settings["victim"]]
    begin = time.monotonic()
    program.require_right(program.run(), others, others)
    took = time.monotonic() - begin
    views = np.ones((rig.size, rig.size), np.int32)
    views[:, settings["victim"]] = 0
    begin = time.monotonic()
    program.require_right(program.run(views), others, others)
    print(f"seen without it after {took:.2f} s, then after {time.monotonic() - begin:.3f} s", flush=True)


def launch_in_other_order(rig: Rig) -> None:
    """Every second process launches two programs the other way round; then all go on with a new group."""
    programs = [rig.program("dispatch rank", FEW), rig.program("combine expert", FEW)]
    mine = programs if process % 2 == 0 else programs[::-1]
    told = ""
    for _ in range(settings["repeats"]):
        for program in programs:
            jax.block_until_ready(program.run(0))
        told = give_up(rig, mine, [], float(rig.rng.uniform(0, 0.05)))
        rig.regroup()
        for program in programs:
            program.require_right(1)
    print("seen", told, flush=True)


def stall_by_turns(rig: Rig) -> None:
    """A rank stalls for longer than the time-out, but less than twice; then all go on with a new group."""
    told, plan = "", np.random.default_rng(settings["seed"])  # the same on all processes
    for _ in range(settings["repeats"]):
        program = rig.program(KINDS[plan.integers(len(KINDS))], FEW)
        jax.block_until_ready(program.run(0))
        late, phase = int(plan.integers(rig.size)), 1 + int(plan.integers(2))
        seconds, held_up_s = TIMEOUT_S * plan.uniform(1.2, 1.7), 0.0
        if late in rig.local:
            rig.stall(late, phase, seconds)
            held_up_s = seconds * program.num_ops  # in each of them, also once the first one has failed
        told = give_up(rig, [program], [late], 0.05, held_up_s)
        rig.end_stalls()
        rig.regroup()
        program.require_right(1)
    print("seen", told, flush=True)


def be_stuck(rig: Rig) -> None:
    """A rank stays inside for much longer than twice the time-out: this process must not go on."""
    program = rig.program(KINDS[settings["seed"] % len(KINDS)], FEW)
    stuck = int(rig.rng.integers(rig.size))
    rig.stall(stuck, 2, TIMEOUT_S * float(rig.rng.uniform(6, 9)))
    results = program.run(1)
    # The device waits some seconds more, in which the host may learn that the rank's process has ended.
    deadline = time.monotonic() + 2 * TIMEOUT_S + SLACK_S + 5
    text = ""
    while "stopped" not in text and time.monotonic() < deadline:
        time.sleep(0.02)
        text = checked(rig.group)
    print("check:", text, flush=True)
    print("raised:", attempt(lambda: results), attempt(lambda: program.run(0)), flush=True)
    if settings["seed"] % 2:
        time.sleep(60)  # but it is ended before


def main() -> None:
    tasks = {
        "killed": be_killed,
        "left": be_left,
        "order": launch_in_other_order,
        "stalled": stall_by_turns,
        "stuck": be_stuck,
    }
    try:
        tasks[task](make_rig())
    except (Exception, jax_ep.PeerTimeoutError):
        traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
    sys.stdout.flush()
    os._exit(0)  # jax.distributed would wait for the dead


main()
