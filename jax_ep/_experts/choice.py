"""The choice of an engine, once per op."""

from jax_ep import _extension
from jax_ep._experts.engine import Engine
from jax_ep._experts.kernel_engine import KernelEngine
from jax_ep._experts.xla_engine import XlaEngine


def choose_engine(implementation: str | None, num_sms: int = 0) -> Engine:
    """Returns the engine of an op, with the precision "default". num_sms 0: all SMs.

    Raises ValueError if the implementation cannot be used.
    """
    return KernelEngine(num_sms) if _extension.runs_kernels(implementation) else XlaEngine()
