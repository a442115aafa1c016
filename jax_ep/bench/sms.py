"""How many SMs an op takes."""

import math
from typing import Any

import jax

from jax_ep import _extension
from jax_ep._group.group import Group
from jax_ep._transport.routing import worst_case_capacity
from jax_ep.bench.shapes import Shape

# Kernels of a step that carry rows over the links.
CARRIERS = {
    "dispatch": ("push",),
    "dispatch FP8": ("FP8 push",),
    "combine": ("pull",),
    "round trip": ("push", "pull"),
    "chained pair": ("push", "pull"),
    "forward + backward": ("push", "pull"),
}


def bytes_of(op: str, size: float) -> float:
    """What an op carries of bfloat16 rows of `size` bytes: FP8 has a byte an element, and a scale for 128."""
    return size * (1 + 4 / 128) / 2 if op == "dispatch FP8" else size


def sms_of(
    group: Group, op: str, order: Any, shape: Shape, ranks: int, capacity: int | None, num_sms: int | None
) -> int | None:
    """SMs of the largest of an op's kernels, by the plan of many tokens.

    None for local ops, which take all, for few tokens, whose kernels go by another plan, and without GPUs.
    """
    module, device = _extension.extension(), jax.devices()[0]
    if module is None or device.platform != "gpu" or op not in CARRIERS:
        return None
    row_bytes = bytes_of(op, 2.0 * shape.hidden)
    sizes = [ranks, shape.tokens, shape.top_k, shape.experts]
    by_expert = order != "rank"
    if module.fits_arena(group._key, op == "combine", by_expert, sizes, math.ceil(row_bytes / 16) * 16):
        return None
    kernels = CARRIERS[op]
    if op == "forward + backward" and by_expert:
        kernels = (*kernels, "scaled push")
    if capacity is None:
        local = shape.experts // ranks
        capacity = worst_case_capacity(order, ranks * shape.tokens, shape.top_k, local, 1)
    return max(
        sum(
            module.plan_sms(kernel, by_expert, [*sizes, capacity], row_bytes, device.core_count, num_sms or 0)
        )
        for kernel in kernels
    )
