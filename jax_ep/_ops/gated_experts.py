"""GatedExperts: what the experts of a layer are, for `moe` in the place of a function."""

import dataclasses
import functools
import math
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jax_ep._experts.activations import Activation
from jax_ep._experts.fp8_operands import QuantizedWeights
from jax_ep._experts.gated import without_gradient_if_forward_only
from jax_ep._experts.mlp import MlpCall, up, up_factors
from jax_ep._experts.products import PrecisionName
from jax_ep._extension import Implementation
from jax_ep._jax.custom_vjp import attached
from jax_ep._jax.ffi_call import Call
from jax_ep._jax.sharding import vary_alike
from jax_ep._ops.beside import LayerCall, engine_beside
from jax_ep._ops.dispatched import DispatchedByExpert
from jax_ep._ops.expert_layer import LayerOperands, Shared, expert_layer
from jax_ep._ops.gated_mlp import gated_mlp, prepare
from jax_ep._rows.fp8 import QuantizedArray
from jax_ep._rows.weights import Matrices, PhysicalWeights, as_array
from jax_ep._transport.backend import Backend, Packing, Push

# Of a field that is part of the program, and no array.
_STATIC = {"static": True}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GatedExperts:
    """The gated MLPs of this rank's experts, for `jax_ep.moe` in the place of expert_fn.

    `moe(x, topk_idx, topk_weights, experts, group=group)` computes `jax_ep.gated_mlp` of the rows that come.
    From this object `moe` also learns what a function cannot tell it: the number of experts, the weights that
    redundant experts need, and that tokens may travel as FP8.

    It is a pytree of its arrays. So it may be made outside of `shard_map` from the arrays of all experts, and
    passed in with `P("ep")` as its spec. It can be a layer's parameters; their gradient is another one.

    Attributes:
      w_up: [L, H, 2, F] gate and up projection, or [L, H, 2F]; as for `gated_mlp`, also `PhysicalWeights`, or
        the result of `quantize_weights`, of which a server needs that with `gradients=False`.
      w_down: [L, F, H], likewise.
      b_up: floating [L, 2, F] or [L, 2F], or None.
      b_down: floating [L, H] or None.
      activation: "silu", "gelu", "clipped", or a function of gate and up, as for `gated_mlp`.
      quantize: None, "fp8" or "fp8_all": the products, as for `gated_mlp`. If `moe` is not told how tokens
        travel, bfloat16 tokens then travel as FP8, too.
      save: "preactivation" or "inputs": what the backward pass gets, as for `gated_mlp`.
      round_scale: if true, scales are rounded up to powers of two.
      precision: of products of float32 operands, as for `grouped_dot`.
      num_sms: how many SMs the products take at most, as for `grouped_dot`.
      implementation: None, "ffi" or "xla": that of the products.
      overlap: whether `moe` moves rows while products run, where it can: between GPUs of one domain, in a
        `shard_map` over all mesh axes. None: where that was measured to be faster (docs/howto/overlap.md).
        Results have the same bits, but rows of both need memory at once.
    """

    w_up: ArrayLike | PhysicalWeights | QuantizedWeights
    w_down: ArrayLike | PhysicalWeights | QuantizedWeights
    b_up: ArrayLike | PhysicalWeights | None = None
    b_down: ArrayLike | PhysicalWeights | None = None
    activation: str | Activation = dataclasses.field(default="silu", metadata=_STATIC)
    quantize: Literal["fp8", "fp8_all"] | None = dataclasses.field(default=None, metadata=_STATIC)
    save: Literal["preactivation", "inputs"] = dataclasses.field(default="preactivation", metadata=_STATIC)
    round_scale: bool = dataclasses.field(default=False, metadata=_STATIC)
    precision: PrecisionName | jax.lax.Precision | None = dataclasses.field(default=None, metadata=_STATIC)
    num_sms: int | None = dataclasses.field(default=None, metadata=_STATIC)
    implementation: Implementation | None = dataclasses.field(default=None, metadata=_STATIC)
    overlap: bool | None = dataclasses.field(default=None, metadata=_STATIC)

    @property
    def num_experts(self) -> int:
        """The number of experts whose weights these are: inside of `shard_map` L, those of this rank."""
        w = self.w_up
        return w.shape[0] if isinstance(w, PhysicalWeights | QuantizedWeights) else jnp.shape(w)[0]

    def __call__(self, sent: DispatchedByExpert[Any], row_weights: jax.Array | None = None) -> jax.Array:
        """Returns the experts' rows [C, H] for the rows of a dispatch, times row weights if any."""
        options = _mlp_options(self, row_weights)
        return gated_mlp(sent.x, self.w_up, self.w_down, sent.group_sizes, **options)


class SharedExpert(NamedTuple):
    """A shared expert, as `combined_rows` takes it."""

    call: MlpCall
    arrays: Shared


def combined_rows(
    experts: GatedExperts,
    sent: DispatchedByExpert[Any],
    tokens: Push,
    backend: Backend,
    *,
    applies_weights: bool,
    packing: Packing,
    quantizes_gradient: bool,
    shared: SharedExpert | None,
) -> jax.Array:
    """Returns the sums [T, H] of the experts' rows. Their gradient goes to the tokens, not to `sent`.

    A shared expert's rows are added. `sent` is the dispatch of these tokens. `applies_weights`: the experts
    apply the row weights, and the combine does not. `packing`: the form in which sums travel.
    `quantizes_gradient`: their cotangents travel as FP8.
    """
    rows = sent.x
    if isinstance(rows, QuantizedArray):
        rows = dataclasses.replace(rows, carrier=None)
    assert sent.row_weights is not None
    options = _mlp_options(experts, sent.row_weights if applies_weights else None)
    # The combine reads rows of tokens only. A function of the user's may read all rows.
    clears_rows = callable(experts.activation)
    mlp, operands = prepare(
        rows, experts.w_up, experts.w_down, sent.group_sizes, clears_rows=clears_rows, **options
    )
    of_shared, arrays = (None, None) if shared is None else shared
    call = LayerCall(
        mlp,
        backend,
        weighs=not applies_weights,
        packing=packing,
        quantizes_gradient=quantizes_gradient,
        overlap=experts.overlap,
        shared=of_shared,
    )
    sums = expert_layer(call, LayerOperands(sent.handle, tokens, sent.row_weights, operands, arrays))
    return without_gradient_if_forward_only("moe", (tokens, sent.row_weights, operands, arrays), sums)


def shared_expert(shared: GatedExperts, x: jax.Array, num_valid_tokens: ArrayLike | None) -> SharedExpert:
    """Returns the shared expert of tokens [T, H], of which the first are valid."""
    valid = x.shape[0] if num_valid_tokens is None else num_valid_tokens
    sizes = jnp.clip(jnp.asarray(valid, jnp.int32).reshape(1), 0, x.shape[0])
    try:
        clears_rows = num_valid_tokens is not None  # otherwise all rows are this expert's
        options = _mlp_options(shared, None)
        call, operands = prepare(x, shared.w_up, shared.w_down, sizes, clears_rows=clears_rows, **options)
    except (TypeError, ValueError) as error:
        raise type(error)(f"moe: shared: {error}") from None
    return SharedExpert(call, Shared(vary_alike(operands)))


def first_product_of(shared: SharedExpert, backend: Backend, overlap: bool | None) -> Call[Matrices] | None:
    """Returns the call of a shared expert's first product, if it should run beside the dispatch."""
    call, operands = shared.call, shared.arrays.operands
    engine = engine_beside(call, backend, overlap, math.prod(operands.rows.shape))
    return None if engine is None else engine.call_of(up_factors(call, jax.lax.stop_gradient(operands)))


def with_first_product(shared: SharedExpert, computed: Matrices | None) -> SharedExpert:
    """Returns the shared expert, whose first product was computed, if it was."""
    call, operands = shared.call, shared.arrays.operands
    product = None if computed is None else as_array(computed)
    if product is not None and call.quantize is None:  # in FP8 it has no second derivative
        product = attached(functools.partial(up, call), product, operands)
    return SharedExpert(call, Shared(operands, product))


def _mlp_options(experts: GatedExperts, row_weights: jax.Array | None) -> dict[str, Any]:
    """Returns the keyword arguments of `gated_mlp`."""
    return {
        "b_up": _bias(experts.b_up),
        "b_down": _bias(experts.b_down),
        "row_weights": row_weights,
        "activation": experts.activation,
        "precision": experts.precision,
        "quantize": experts.quantize,
        "save": experts.save,
        "round_scale": experts.round_scale,
        "num_sms": experts.num_sms,
        "implementation": experts.implementation,
    }


def _bias(bias: ArrayLike | PhysicalWeights | None) -> jax.Array | None:
    return None if bias is None else jnp.asarray(bias)
