"""Programs that can be lowered for one platform only."""

from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import mlir

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
