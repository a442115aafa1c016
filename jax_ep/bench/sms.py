"""Number of SMs that an op uses."""

import math
from typing import Any

import jax

from jax_ep import _extension
from jax_ep._group.group import Group, ranks_of
from jax_ep._transport.routing import worst_case_capacity
from jax_ep.bench.programs import IN_FP8
from jax_ep.bench.shapes import Shape

# Op -> its kernels that move rows over the links.
LINK_KERNELS = {
    "dispatch": ("push",),
    "dispatch FP8": ("FP8 push",),
    "combine": ("pull",),
    "combine FP8": ("FP8 pull",),
    "round trip": ("push", "pull"),
    "chained pair": ("push", "pull"),
    "forward + backward": ("push", "pull"),
}


def bytes_of(op: str, size: float) -> float:
    """Returns the bytes that an op sends for `size` bytes of bfloat16 rows.

    FP8 has one byte per element, and one float32 scale per 128 elements.
    """
    return size * (1 + 4 / 128) / 2 if op in IN_FP8 else size


def sms_of(
    group: Group, op: str, order: Any, shape: Shape, ranks: int, capacity: int | None, num_sms: int | None
) -> int | None:
    """Returns the number of SMs of an op's largest kernel, or None if it is not planned ahead.

    Local ops use all SMs. Ops with few tokens choose the number in the kernels' own way. Without GPUs there
    are no SMs. In these cases the result is None.
    """
    module, device = _extension.extension(), jax.devices()[0]
    if module is None or device.platform != "gpu" or op not in LINK_KERNELS:
        return None
    row_bytes = bytes_of(op, 2.0 * shape.hidden)
    sizes = [ranks, shape.tokens, shape.top_k, shape.experts]
    by_expert = order != "rank"
    key, row_bytes = ranks_of(group).key, math.ceil(row_bytes / 16) * 16
    if module.fits_arena(key, op.startswith("combine"), by_expert, sizes, row_bytes):
        return None
    kernels = LINK_KERNELS[op]
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
