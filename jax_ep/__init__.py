"""Expert parallelism for JAX: dispatch tokens to their experts, combine what comes back.

Everything here is pure and differentiable, for use inside `jax.shard_map`. Start with `moe`, or with
`dispatch` and `combine`.
"""

from jax_ep._combine import combine as combine
from jax_ep._dispatch import DispatchedByExpert as DispatchedByExpert
from jax_ep._dispatch import DispatchedByRank as DispatchedByRank
from jax_ep._dispatch import dispatch as dispatch
from jax_ep._dispatch import redispatch as redispatch
from jax_ep._export import DISABLE_JAX_EXPORT_CHECKS as DISABLE_JAX_EXPORT_CHECKS
from jax_ep._group import Group as Group
from jax_ep._group import PeerTimeoutError as PeerTimeoutError
from jax_ep._group_stats import GroupStats as GroupStats
from jax_ep._grouped_dot import grouped_dot as grouped_dot
from jax_ep._handle import Handle as Handle
from jax_ep._layout import DispatchLayout as DispatchLayout
from jax_ep._layout import get_dispatch_layout as get_dispatch_layout
from jax_ep._moe import MoEStats as MoEStats
from jax_ep._moe import moe as moe
from jax_ep._permute import Permuted as Permuted
from jax_ep._permute import permute as permute
from jax_ep._permute import unpermute as unpermute
from jax_ep._quantize import QuantizedArray as QuantizedArray
from jax_ep._quantize import dequantize_fp8 as dequantize_fp8
from jax_ep._quantize import quantize_fp8 as quantize_fp8
from jax_ep._remat import CHECKPOINT_HANDLE as CHECKPOINT_HANDLE
from jax_ep._remat import CHECKPOINT_ROWS as CHECKPOINT_ROWS
from jax_ep._remat import CHECKPOINT_WEIGHTS as CHECKPOINT_WEIGHTS
from jax_ep._remat import save_ep_residuals as save_ep_residuals
from jax_ep._start_done import PendingCombine as PendingCombine
from jax_ep._start_done import PendingDispatch as PendingDispatch
from jax_ep._start_done import combine_done as combine_done
from jax_ep._start_done import combine_start as combine_start
from jax_ep._start_done import dispatch_done as dispatch_done
from jax_ep._start_done import dispatch_start as dispatch_start
from jax_ep._statistics import DispatchStatistics as DispatchStatistics

__all__ = [
    "CHECKPOINT_HANDLE",
    "CHECKPOINT_ROWS",
    "CHECKPOINT_WEIGHTS",
    "DISABLE_JAX_EXPORT_CHECKS",
    "DispatchLayout",
    "DispatchStatistics",
    "DispatchedByExpert",
    "DispatchedByRank",
    "Group",
    "GroupStats",
    "Handle",
    "MoEStats",
    "PeerTimeoutError",
    "PendingCombine",
    "PendingDispatch",
    "Permuted",
    "QuantizedArray",
    "combine",
    "combine_done",
    "combine_start",
    "dequantize_fp8",
    "dispatch",
    "dispatch_done",
    "dispatch_start",
    "get_dispatch_layout",
    "grouped_dot",
    "moe",
    "permute",
    "quantize_fp8",
    "redispatch",
    "save_ep_residuals",
    "unpermute",
]
__version__ = "0.1.0"
