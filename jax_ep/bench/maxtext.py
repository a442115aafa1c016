"""MaxText's layer of experts, for comparison: its `RoutedMoE` with a ring of experts, without its router.

Each rank gathers all tokens, and takes the rows of its experts into a buffer. All sums are added. On GPUs the
products are tokamax's kernels, and on CPUs `jax.lax.ragged_dot`.
"""

import importlib.metadata
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

import jax_ep
from jax_ep.bench import peers
from jax_ep.bench.shapes import Shape

VERSION = "0.2.5"  # `layer` calls methods that other versions may not have
# The gathers fall back to XLA because MaxText's kernels are for TPUs. `w_up` is one array, hence prefused.
OPTIONS = """
  dtype=bfloat16 weight_dtype=bfloat16 decoder_block=mixtral sparse_matmul=True megablox=False
  prefuse_moe_weights=True ragged_gather_fallback=True ragged_gather_reduce_fallback=True
  run_name=bench log_config=False dataset_type=synthetic skip_jax_distributed_system=True
  enable_checkpointing=False enable_goodput_recording=False
"""


def missing() -> str | None:
    """Returns why the layer cannot run, if it cannot. Imports MaxText if it is installed."""
    try:
        installed = importlib.metadata.version("maxtext")
    except importlib.metadata.PackageNotFoundError:
        return f"maxtext {VERSION} is not installed"
    if installed != VERSION:
        return f"it needs maxtext {VERSION}, and {installed} is installed"
    os.environ.setdefault("DECOUPLE_GCLOUD", "TRUE")  # without it, MaxText needs Google Cloud's packages
    try:
        import maxtext.layers.moe  # noqa: F401  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        return f"a package that MaxText imports is not installed ({error})"
    return None


def layer(group: jax_ep.Group, shape: Shape, factor: float, on_gpu: bool) -> Callable[..., Any]:
    """Returns a function of w_up, w_down, x, ids and weights, which returns the sums and dropped rows [1].

    `factor` is the size of a rank's buffer relative to the rows of a uniform routing.
    """
    from flax import nnx
    from maxtext.configs import pyconfig  # pyright: ignore[reportMissingImports]
    from maxtext.layers import moe  # pyright: ignore[reportMissingImports]

    top_k, ranks = shape.top_k, group.size
    # With more than one rank, MaxText needs a buffer that cannot hold all rows of all ranks.
    factor = min(factor, 0.999 * ranks) if ranks > 1 else -1.0
    sizes = f"base_emb_dim={shape.hidden} base_mlp_dim={shape.inner} base_moe_mlp_dim={shape.inner}"
    sizes += f" num_experts={shape.experts} num_experts_per_tok={top_k} ici_expert_parallelism={ranks}"
    ways = f"use_ring_of_experts={ranks > 1} use_ragged_sort={ranks > 1} ragged_buffer_factor={factor}"
    ways += f" use_tokamax_gmm={on_gpu} hardware={'gpu' if on_gpu else 'cpu'}"
    file = Path(pyconfig.__file__).with_name("base.yml")
    config = pyconfig.initialize([None, str(file), *f"{OPTIONS} {sizes} {ways}".split()])
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:ranks]), (group.axis_name,))

    def unpacked(packed: jax.Array, *_: Any) -> tuple[jax.Array, jax.Array]:
        return packed[..., :top_k], packed[..., top_k:].astype(jnp.int32)

    def unchanged(value: Any, *_: Any, **__: Any) -> Any:
        return value

    def apply(
        w_up: jax.Array, w_down: jax.Array, x: jax.Array, ids: jax.Array, weights: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        routed = moe.RoutedMoE(
            config,
            shape.experts,
            top_k,
            mesh,
            lambda *_: jnp.zeros(()),  # its own parameters are not used
            (None,),
            nnx.Rngs(0),
            shape.inner,
            jnp.bfloat16,
            jnp.bfloat16,
        )
        # The experts are chosen already: they take the place of the router's scores, which MaxText gathers.
        packed = jnp.concatenate([weights, ids.astype(jnp.float32)], axis=-1)[None]
        # These arrays are those of a rank, so MaxText's own shard_map and sharding have nothing to do.
        routed._expert_parallelism_name = group.axis_name
        routed.get_topk = unpacked
        routed._maybe_shard_with_pspec = unchanged
        with mock.patch.object(jax, "shard_map", unchanged):
            y, *_ = routed.sparse_matmul(
                x[None], packed, None, w_up[:, :, 0], w_up[:, :, 1], w_down, None, None, None
            )
        rows = jnp.sum(peers.group_sizes(ids, shape, ranks))
        dropped = rows - int(factor * ids.size) if ranks > 1 else jnp.int32(0)
        return y[0], jnp.maximum(dropped, 0)[None]

    return apply
