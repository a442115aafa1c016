"""What the fault tests are made of: programs whose right results are known, late ranks, verdicts."""

import contextlib
import dataclasses
import functools
import re
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from cases import BF16, floats, routing, same_bits, weights_of
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_ep
from jax_ep import _extension
from jax_ep._group.group import ranks_of

K, EXPERTS, WIDTH = 4, 64, 512
# Few enough for the slots of the arena, where nobody touches a peer's arrays; not so few; and many.
FEW_ENOUGH_FOR_SLOTS, FEW, SEVERAL_WAVES = 64, 160, 1200
LONG = 4096  # of so many tokens such rows go through shared memory
KINDS = tuple(f"{op} {order}" for op in ("dispatch", "combine", "gradient") for order in ("rank", "expert"))
SLACK_S = 0.25
UNIT_S = 0.025  # what a piece of work takes that keeps a GPU busy
ERRORS = (jax.errors.JaxRuntimeError, jax_ep.PeerTimeoutError)


class Failure(Exception):
    """A promise was broken."""


def require(holds: bool, text: str) -> None:
    if not holds:
        raise Failure(text)


# ---- programs ----


def op_of(kind: str, group: jax_ep.Group) -> Callable[..., Any]:
    """A rank's part: of a dispatch and a gradient (x, ids, weights), of a combine (rows, handle, weights)."""
    op, order = kind.split()

    def dispatch(x: jax.Array, ids: jax.Array, weights: jax.Array) -> Any:
        options = {"num_experts": EXPERTS, "order": order, "implementation": "ffi"}
        return jax_ep.dispatch(x, ids, weights, group=group, **options)

    def combine(rows: jax.Array, handle: Any, weights: jax.Array) -> jax.Array:
        row_weights = weights if order == "expert" else None
        return jax_ep.combine(rows, handle, row_weights=row_weights, implementation="ffi")

    def gradient(x: jax.Array, ids: jax.Array, weights: jax.Array) -> Any:
        def layer(x: jax.Array, weights: jax.Array) -> Any:
            sent = dispatch(x, ids, weights)
            return combine(sent.x, sent.handle, weights_of(sent)), weights_of(sent)

        y, transposed = jax.vjp(layer, x, weights)
        return y, transposed(jax.tree.map(jnp.cos, y))

    return {"dispatch": dispatch, "combine": combine, "gradient": gradient}[op]


@dataclasses.dataclass(frozen=True)
class Style:
    """How the ops of a program run."""

    graph: bool = False  # in a scan, replayed as a CUDA graph
    concurrent: bool = False  # two at a time that do not depend on each other
    nccl: bool = False  # beside a sum over all ranks

    @property
    def steps(self) -> int:
        return 3 if self.graph else 1


class Program:
    """A compiled program, two batches for it, and what comes out of them; leaves are [ranks, steps, ...]."""

    def __init__(self, rig: "Rig", kind: str, tokens: int):
        self.rig, self.kind, self.tokens = rig, kind, tokens
        self.op = kind.split()[0]
        at_a_time = 2 if rig.style.concurrent else 1
        self.num_ops = (4 if self.op == "gradient" else 1) * at_a_time * rig.style.steps
        self._args: list[tuple[Any, ...]] | None = [self._arguments(seed) for seed in (11, 12)]
        self._host: Any = None
        mapped = jax.shard_map(
            self._shard, mesh=rig.mesh, in_specs=P("ep"), out_specs=P("ep"), check_vma=False
        )
        options = {"xla_gpu_graph_min_graph_size": 1} if rig.style.graph else {}
        lowered = jax.jit(mapped).lower(rig.delays({}), *self.args[0])
        self.compiled = lowered.compile(compiler_options=options)
        paths, _ = jax.tree.flatten_with_path(lowered.out_info)
        self.names = [jax.tree_util.keystr(path) for path, _ in paths]
        # Peers also write to and read from what lies between the ops of a program.
        self.temporary_bytes = getattr(self.compiled.memory_analysis(), "temp_size_in_bytes", 0)
        self.expected: list[dict[int, list[np.ndarray]]] = []

    @property
    def args(self) -> list[tuple[Any, ...]]:
        if self._args is None:
            self._args = self.rig.put(self._host)
        return self._args

    def leave_the_devices(self) -> None:
        """Keeps its arguments on the host until the next run."""
        if self._host is None:
            self._host = jax.tree.map(np.asarray, self.args)
        self._args = None

    def _arguments(self, seed: int) -> tuple[Any, ...]:
        rig, ranks = self.rig, self.rig.size
        width = LONG if self.tokens == SEVERAL_WAVES else WIDTH
        x = floats((ranks * self.tokens, width), BF16, seed)
        ids = routing("sprinkled", ranks, self.tokens, K, EXPERTS, seed).reshape(-1, K)
        weights = floats((ranks * self.tokens, K), seed=seed + 1)
        noise = np.arange(ranks * 2**18, dtype=np.float32).reshape(ranks, -1) % (seed + 100)
        arguments = rig.put((x, ids, weights))
        if self.op == "combine":
            dispatch = op_of(f"dispatch {self.kind.split()[1]}", rig.group)
            mapped = jax.shard_map(
                dispatch, mesh=rig.mesh, in_specs=P("ep"), out_specs=P("ep"), check_vma=False
            )
            sent = jax.jit(mapped)(*arguments)
            arguments = (sent.x, sent.handle, weights_of(sent))
        return (rig.put(noise), *arguments)

    def _shard(self, delay: jax.Array, noise: jax.Array, x: jax.Array, *others: Any) -> Any:
        style, op = self.rig.style, op_of(self.kind, self.rig.group)
        x = x + self.rig.hold_up(delay).astype(x.dtype)

        def step(_: Any, i: jax.Array) -> tuple[Any, Any]:
            row = x + i.astype(x.dtype)
            out = [op(row, *others)]
            if style.concurrent:
                out.append(op(-row, *others))
            return _, (out, jax.lax.psum(noise + i.astype(noise.dtype), "ep") if style.nccl else None)

        steps = jnp.arange(style.steps, dtype=jnp.int32)
        out = jax.lax.scan(step, None, steps)[1] if style.graph else step(None, steps[0])[1]
        lead = (lambda leaf: leaf[None]) if style.graph else (lambda leaf: leaf[None, None])
        return jax.tree.map(lead, out)

    def run(self, batch: int, delays: dict[int, float] | None = None) -> list[jax.Array]:
        """Launches it; on the CPU the given ranks sleep before their op."""
        return jax.tree.leaves(self.compiled(self.rig.delays(delays or {}), *self.args[batch]))

    def learn(self) -> "Program":
        """Runs it with all ranks at hand: what comes out is right (other tests say so)."""
        for batch in (0, 1):
            self.expected.append(self.rig.fetch(self.run(batch)))
        self.rig.group.check()
        return self

    def require_right(self, batch: int) -> None:
        for rank, leaves in self.rig.fetch(self.run(batch)).items():
            require(self.judge(batch, rank, leaves) == "right", f"{self.kind}: rank {rank} has no results")

    def judge(self, batch: int, rank: int, leaves: list[np.ndarray] | None) -> str:
        """Whether a rank's results are "right", "refused" or an "error"; raises Failure if they are none."""
        if leaves is None:
            return "error"
        verdict = "right"
        for name, leaf, right in zip(self.names, leaves, self.expected[batch][rank], strict=True):
            for step in range(leaf.shape[1]):
                got = leaf[:, step]
                if got.size == 0 or same_bits(got, right[:, step]):
                    continue
                if not is_refused(got):
                    stale = same_bits(got, self.expected[1 - batch][rank][self.names.index(name)][:, step])
                    wrong = np.count_nonzero(got != right[:, step])
                    raise Failure(
                        f"{self.kind}, {self.tokens} tokens: rank {rank}{name}, step {step}: {wrong} of "
                        f"{got.size} elements are wrong{', all of an earlier step' if stale else ''}: "
                        f"{got.ravel()[:8]}"
                    )
                verdict = "refused"
        return verdict


def is_refused(values: np.ndarray) -> bool:
    """Whether an array says that its op has failed: NaN, -1, or 0 where it counts."""
    if jnp.issubdtype(values.dtype, jnp.floating):
        return bool(np.isnan(values.astype(np.float32)).all())
    return bool((values == -1).all() or (values == 0).all())


# ---- what the programs run on ----


class Rig:
    """The devices, their group, and programs that are compiled once."""

    def __init__(self, devices: list[Any], timeout_s: float, style: Style, seed: int):
        self.devices, self.timeout_s, self.style = devices, timeout_s, style
        self.size = len(devices)
        self.on_gpus = devices[0].platform == "gpu"
        self.rng = np.random.default_rng(seed)
        self.programs: dict[tuple[str, int], Program] = {}
        self.mesh = Mesh(np.array(devices), ("ep",))
        self.sharding = NamedSharding(self.mesh, P("ep"))
        self.group = jax_ep.Group(self.mesh, "ep", timeout_s=timeout_s)
        require(self.group.info().implementation == "ffi", str(self.group.info()))
        me = jax.process_index()
        self.local = [rank for rank, device in enumerate(devices) if device.process_index == me]

    @functools.cached_property
    def module(self) -> Any:
        return _extension.extension()

    def program(self, kind: str, tokens: int) -> Program:
        if (kind, tokens) not in self.programs:
            with self.patience():
                self.programs[kind, tokens] = Program(self, kind, tokens).learn()
        return self.programs[kind, tokens]

    @contextlib.contextmanager
    def patience(self, timeout_s: float = 60.0) -> Iterator[None]:
        """While programs run for the first time: what is loaded then takes longer than the time-out."""
        usual = self.timeout_s
        self.regroup(timeout_s)
        try:
            yield
        finally:
            self.regroup(usual)

    def leave_the_devices(self) -> None:
        """Keeps no array on the devices until the next run."""
        for program in self.programs.values():
            program.leave_the_devices()
        self.__dict__.pop("_busy", None)

    def regroup(self, timeout_s: float | None = None) -> None:
        """Makes the group anew, as after an error; the old one is closed before or after."""
        old, close_first = self.group, self.rng.random() < 0.5
        if close_first:
            old.close()
        self.timeout_s = timeout_s or self.timeout_s
        self.group = jax_ep.Group(self.mesh, "ep", timeout_s=self.timeout_s)
        if not close_first:
            old.close()
        self.group.check()

    def put(self, arrays: Any) -> Any:
        def one(array: np.ndarray) -> jax.Array:
            return jax.make_array_from_callback(array.shape, self.sharding, lambda index: array[index])

        return jax.tree.map(one, arrays)

    def delays(self, seconds: dict[int, float]) -> jax.Array:
        return self.put(np.array([seconds.get(rank, 0) for rank in range(self.size)], np.float32))

    def hold_up(self, delay: jax.Array) -> jax.Array:
        """0, on the CPU after the delay. On GPUs a rank is held up from outside."""
        if self.on_gpus:
            return jnp.zeros((), jnp.int32)

        def sleep(seconds: Any) -> np.ndarray:
            time.sleep(float(np.asarray(seconds)))
            return np.zeros((), np.int32)

        return jax.pure_callback(sleep, jax.ShapeDtypeStruct((), np.int32), delay[0])

    def shards(self, results: list[jax.Array]) -> dict[int, list[jax.Array]]:
        """The leaves' shards on each rank of this process."""
        by_device = [{s.device: s.data for s in leaf.addressable_shards} for leaf in results]
        return {rank: [leaf[self.devices[rank]] for leaf in by_device] for rank in self.local}

    def launch(
        self, program: Program, batch: int, delays: dict[int, float] | None = None
    ) -> dict[int, list[jax.Array] | None]:
        """The shards of a run that may fail, by rank; None if it already has."""
        try:
            return dict(self.shards(program.run(batch, delays)))
        except ERRORS:
            return dict.fromkeys(self.local)

    def fetch(self, results: list[jax.Array]) -> dict[int, list[np.ndarray]]:
        return {r: [np.asarray(leaf) for leaf in leaves] for r, leaves in self.shards(results).items()}

    @functools.cached_property
    def _busy(self) -> tuple[Callable[[jax.Array], jax.Array], jax.Array]:
        """A program that keeps the last device busy for UNIT_S."""
        # Few large products: a thousand kernels in the queue would hold up the thread that launches.
        x = jax.device_put(np.eye(8192, dtype=np.float32), self.devices[-1])

        def products(count: int) -> Callable[[jax.Array], jax.Array]:
            return jax.jit(lambda a: jax.lax.fori_loop(0, count, lambda _, b: b @ a, a))

        trial, warm = products(50), time.perf_counter() + 0.7  # until when the clocks rise
        while time.perf_counter() < warm:
            trial(x).block_until_ready()
        begin = time.perf_counter()
        trial(x).block_until_ready()
        unit = products(max(1, round(50 * UNIT_S / (time.perf_counter() - begin))))
        unit(x).block_until_ready()
        return unit, x

    def keep_busy(self, seconds: float) -> None:
        """Queues work on the last device: what is launched there next begins so much later."""
        unit, x = self._busy
        for _ in range(max(1, round(seconds / UNIT_S))):
            unit(x)

    def stall(self, rank: int, phase: int, seconds: float) -> None:
        self.module.inject_stall(ranks_of(self.group).key, rank, phase, float(seconds))

    def end_stalls(self) -> None:
        for rank in self.local if self.on_gpus else []:
            self.stall(rank, 1, 0)
            self.stall(rank, 2, 0)


def fetch_or_none(shards: list[jax.Array] | None) -> list[np.ndarray] | None:
    """What a rank's op leaves, or None where its program raised."""
    if shards is None:
        return None
    try:
        return [np.asarray(shard) for shard in shards]
    except ERRORS:
        return None


def attempt(call: Callable[[], Any]) -> str:
    """The text of the error that a program ends with, empty if none."""
    try:
        jax.block_until_ready(call())
    except ERRORS as error:
        return str(error)
    return ""


def checked(group: jax_ep.Group) -> str:
    return attempt(group.check)


def require_named(text: str, ops: Iterable[str], missing: Iterable[int] = ()) -> None:
    """The error names these ops, and these ranks as missing."""
    plain = re.sub(r"Group\([^)]*\)", "Group", text)  # which shows the devices' numbers
    for op in ops:
        require(op in plain, f"the error does not name {op!r}: {text!r}")
    for rank in missing:
        found = re.search(rf"rank\(?s?\)?[ ,\d]*\b{rank}\b", plain)
        require(found is not None, f"the error does not name rank {rank} as missing: {text!r}")
