"""Programs that can be lowered for one platform only."""

from typing import Any, TypeVar

import jax
from jax.extend.core import Primitive
from jax.interpreters import mlir

Aval = TypeVar("Aval")


def on_platform(x: jax.Array, platform: str, group: str) -> jax.Array:
    """Returns x. A program that uses the result can be lowered only for `platform`, that of the group."""
    return _on_platform.bind(x, platform=platform, group=group)


def _abstract_eval(x: Aval, *, platform: str, group: str) -> Aval:
    return x


def _run_eagerly(x: jax.Array, *, platform: str, group: str) -> jax.Array:
    # Outside of jit nothing is lowered for another platform: the op itself runs on the group's devices.
    return x


def _lower(ctx: Any, x: Any, *, platform: str, group: str) -> list[Any]:
    platforms = tuple(ctx.platforms or ctx.module_context.platforms)
    names = ("cuda", "gpu") if platform == "gpu" else (platform,)
    if any(other not in names for other in platforms):
        raise ValueError(
            f"jax_ep: this program is lowered for {', '.join(platforms)}, but {group} has {platform} "
            "devices; make the Group from a mesh of the devices that the program will run on, or pass "
            "implementation='xla'"
        )
    return [x]


_on_platform = Primitive("jax_ep_on_platform")
_on_platform.def_impl(_run_eagerly)
_on_platform.def_abstract_eval(_abstract_eval)
mlir.register_lowering(_on_platform, _lower)
