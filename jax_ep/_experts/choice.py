"""The choice of an engine, once per op."""

from jax_ep import _extension
from jax_ep._experts.engine import Engine, Options
from jax_ep._experts.kernel_engine import KernelEngine
from jax_ep._experts.xla_engine import XlaEngine


def choose_engine(implementation: str | None, options: Options) -> Engine:
    """Returns the engine of an op. Raises ValueError if the implementation cannot be used."""
    return KernelEngine(options) if _extension.runs_kernels(implementation) else XlaEngine(options)
