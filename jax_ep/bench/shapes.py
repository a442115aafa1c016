"""Named shapes of real models, for tests and benchmarks."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of a Mixture-of-Experts layer."""

    tokens: int  # per rank
    hidden: int
    top_k: int
    experts: int
    inner: int  # hidden size of an expert


# A padded expert has a slot for each token of all ranks. With more tokens the buffers do not fit into a GPU.
MOST_PADDED_TOKENS = 128

_DEEPSEEK_V3 = Shape(tokens=4096, hidden=7168, top_k=8, experts=256, inner=2048)
_QWEN3_MOE_235B = Shape(tokens=4096, hidden=4096, top_k=8, experts=128, inner=1536)

SHAPES = {
    "deepseek_v3": _DEEPSEEK_V3,
    "deepseek_v3_decode": dataclasses.replace(_DEEPSEEK_V3, tokens=128),
    "deepseek_v3_decode_16": dataclasses.replace(_DEEPSEEK_V3, tokens=16),
    "deepseek_v3_decode_1": dataclasses.replace(_DEEPSEEK_V3, tokens=1),
    "deepseek_v3_64_experts": dataclasses.replace(_DEEPSEEK_V3, experts=64),  # of one of 4 ranks
    "mixtral_8x7b": Shape(tokens=4096, hidden=4096, top_k=2, experts=8, inner=14336),
    "qwen3_moe_235b": _QWEN3_MOE_235B,
    "qwen3_moe_235b_32_experts": dataclasses.replace(_QWEN3_MOE_235B, experts=32),
    "qwen3_30b_a3b": Shape(tokens=32768, hidden=2048, top_k=8, experts=128, inner=768),
    "cpu": Shape(tokens=1024, hidden=1024, top_k=8, experts=64, inner=512),
    "tiny": Shape(tokens=32, hidden=128, top_k=2, experts=16, inner=128),
}
