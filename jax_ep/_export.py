"""What `jax.export` must know of this package's handlers, and what it must not make of them."""

from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import mlir

_TARGETS = (
    "layout",
    "route",
    "push",
    "pull",
    "hop",
    "rail_hop",
    "permute",
    "repermute",
    "unpermute",
    "grouped_dot",
    "grouped_dot_fp8",
)

DISABLE_JAX_EXPORT_CHECKS = tuple(
    jax.export.DisabledSafetyCheck.custom_call(f"jax_ep_{target}") for target in _TARGETS
)
"""For `jax.export.export(..., disabled_checks=jax_ep.DISABLE_JAX_EXPORT_CHECKS)`: the handlers of all ops.

`jax.export` refuses custom calls that it does not know, for their meaning could change from one version to
the next. An exported program runs with the version of jax_ep that it was exported with, after the process
has made an equal `Group`: the same axis names, devices of the same ids in the same order, as many on a host.
"""

_on_platform = Primitive("jax_ep_on_platform")
_on_platform.def_impl(lambda x, **_: x)  # outside of jit the op itself runs where the group is


@_on_platform.def_abstract_eval
def _(x: Any, *, platform: str, group: str) -> Any:
    return x


def _lower(ctx: Any, x: Any, *, platform: str, group: str) -> Any:
    platforms = tuple(ctx.platforms or ctx.module_context.platforms)
    names = ("cuda", "gpu") if platform == "gpu" else (platform,)
    if any(other not in names for other in platforms):
        raise ValueError(
            f"jax_ep: this program is lowered for {', '.join(platforms)}, but {group} has {platform} "
            "devices; make the Group from a mesh of the devices that the program will run on, or pass "
            "implementation='xla'"
        )
    return [x]


mlir.register_lowering(_on_platform, _lower)


def on_platform(x: jax.Array, platform: str, group: str) -> jax.Array:
    """x, in a program that can be lowered for this platform only: that of a group's devices."""
    return _on_platform.bind(x, platform=platform, group=group)
