"""What a backend returns, and the choice of one."""

from typing import Literal, NamedTuple

import jax

from jax_ep._transport.routing import Handle

Leaves = tuple[jax.Array, ...]


OnTimeout = Literal["raise", "mask"]


class LayoutCounts(NamedTuple):
    num_tokens_per_rank: jax.Array  # [R]
    num_tokens_per_node: jax.Array  # [R / ranks_per_node]
    num_tokens_per_expert: jax.Array  # [E]
    is_token_in_rank: jax.Array  # bool [T, R]


class Attendance(NamedTuple):
    """Which ranks take part in an op that some may miss."""

    active_ranks: jax.Array | None = None  # int32 [R], 0: as if it were not there. None: all must come
    masks: bool = False  # a rank that does not come in time is left out; or else the op fails
    waits: bool = False  # measure how long each rank was waited for


class Attended(NamedTuple):
    """What an op found out about that."""

    active_ranks: jax.Array | None  # int32 [R], 0 also for ranks that did not come; None if none came in
    wait_us: jax.Array | None  # float32 [R] microseconds until each rank had come, if measured


EVERYBODY = Attendance()


class Routed(NamedTuple):
    rows: Leaves  # [C, ...] each
    weights: jax.Array | None  # by rank [C, K], by expert [C]
    topk_idx: jax.Array | None  # by rank [C, K]
    tokens_per_expert: jax.Array  # [L]
    group_sizes: jax.Array | None  # by expert [L]
    num_tokens: jax.Array  # [1]
    num_dropped: jax.Array  # [1]
    attended: Attended
    handle: Handle


class Permutation(NamedTuple):
    rows: Leaves  # [P, ...] each
    row_map: jax.Array  # [C, K]
    row_weights: jax.Array | None  # [P]
    group_sizes: jax.Array  # [L]
    tokens_per_expert: jax.Array  # [L]
    num_dropped: jax.Array  # [1]
