"""The choice of an engine, once per op."""

import jax

from jax_ep import _extension
from jax_ep._experts.engine import Engine
from jax_ep._experts.kernel_engine import KernelEngine
from jax_ep._experts.xla_engine import XlaEngine


def choose_engine(num_sms: int = 0, precision: jax.lax.Precision = jax.lax.Precision.DEFAULT) -> Engine:
    """Returns the engine of an op. num_sms 0: all SMs."""
    return KernelEngine(num_sms, precision) if _extension.runs_kernels() else XlaEngine(precision)
