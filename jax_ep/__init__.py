"""Expert parallelism for JAX: dispatches tokens to their experts, and combines the experts' outputs.

All ops are pure functions for use inside `jax.shard_map`, and most of them are differentiable. Start with
`moe`, or with `dispatch` and `combine`.
"""

from jax_ep import checkpoint_names as checkpoint_names
from jax_ep import export as export
from jax_ep import types as types
from jax_ep._experts.fp8_operands import QuantizedWeights as QuantizedWeights
from jax_ep._group.group import Group as Group
from jax_ep._group.group import GroupInfo as GroupInfo
from jax_ep._group.group import PeerTimeoutError as PeerTimeoutError
from jax_ep._ops.balance import balance as balance
from jax_ep._ops.balance import plan_redundant_experts as plan_redundant_experts
from jax_ep._ops.combine import combine as combine
from jax_ep._ops.dispatch import dispatch as dispatch
from jax_ep._ops.dispatched import DispatchedByExpert as DispatchedByExpert
from jax_ep._ops.dispatched import DispatchedByRank as DispatchedByRank
from jax_ep._ops.gated_experts import GatedExperts as GatedExperts
from jax_ep._ops.gated_mlp import gated_mlp as gated_mlp
from jax_ep._ops.grouped_dot import grouped_dot as grouped_dot
from jax_ep._ops.layout import DispatchLayout as DispatchLayout
from jax_ep._ops.layout import get_dispatch_layout as get_dispatch_layout
from jax_ep._ops.moe import MoEStats as MoEStats
from jax_ep._ops.moe import moe as moe
from jax_ep._ops.overlap import Pending as Pending
from jax_ep._ops.overlap import combine_start as combine_start
from jax_ep._ops.overlap import dispatch_start as dispatch_start
from jax_ep._ops.overlap import replicate_start as replicate_start
from jax_ep._ops.permute import permute as permute
from jax_ep._ops.permute import unpermute as unpermute
from jax_ep._ops.quantize import quantize_fp8 as quantize_fp8
from jax_ep._ops.quantize import quantize_weights as quantize_weights
from jax_ep._ops.redispatch import redispatch as redispatch
from jax_ep._ops.replicate import replicate as replicate
from jax_ep._ops.statistics import DispatchStatistics as DispatchStatistics
from jax_ep._placement.placement import Placement as Placement
from jax_ep._rows.checkpoint import save_ep_residuals as save_ep_residuals
from jax_ep._rows.fp8 import QuantizedArray as QuantizedArray
from jax_ep._rows.fp8 import dequantize_fp8 as dequantize_fp8
from jax_ep._rows.weights import PhysicalWeights as PhysicalWeights
from jax_ep._transport.routing import Handle as Handle

__all__ = [
    "DispatchLayout",
    "DispatchStatistics",
    "DispatchedByExpert",
    "DispatchedByRank",
    "GatedExperts",
    "Group",
    "GroupInfo",
    "Handle",
    "MoEStats",
    "PeerTimeoutError",
    "Pending",
    "PhysicalWeights",
    "Placement",
    "QuantizedArray",
    "QuantizedWeights",
    "balance",
    "checkpoint_names",
    "combine",
    "combine_start",
    "dequantize_fp8",
    "dispatch",
    "dispatch_start",
    "gated_mlp",
    "get_dispatch_layout",
    "grouped_dot",
    "moe",
    "permute",
    "plan_redundant_experts",
    "quantize_fp8",
    "quantize_weights",
    "redispatch",
    "replicate",
    "replicate_start",
    "save_ep_residuals",
    "unpermute",
]
__version__ = "0.1.0"
