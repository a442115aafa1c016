"""Types of results that programs seldom import by hand, for annotations."""

from jax_ep._ops.dispatched import RowSources as RowSources
from jax_ep._ops.permute import Permuted as Permuted

__all__ = ["Permuted", "RowSources"]
