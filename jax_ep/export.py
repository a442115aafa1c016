"""Settings of `jax.export` for this package's handlers."""

import jax

_TARGETS = (
    "layout",
    "balance",
    "route",
    "push",
    "pull",
    "route_beside",
    "push_beside",
    "pull_beside",
    "hop",
    "rail_hop",
    "permute",
    "repermute",
    "unpermute",
    "grouped_dot",
    "quantize",
    "quantize_gated",
)


def disabled_checks() -> tuple[jax.export.DisabledSafetyCheck, ...]:
    """Returns the checks to disable in `jax.export.export(f, disabled_checks=...)`: the handlers of all ops.

    `jax.export` refuses custom calls that it does not know, because their meaning could change from one
    version to the next. An exported program runs with the version of jax_ep that it was exported with, after
    the process has made an equal `Group`: the same axis names, devices of the same ids in the same order, as
    many on a host.
    """
    return tuple(jax.export.DisabledSafetyCheck.custom_call(f"jax_ep_{target}") for target in _TARGETS)
