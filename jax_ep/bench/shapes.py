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


# A padded expert has a row for each token of all ranks. With more tokens the buffers do not fit into a GPU.
MOST_PADDED_TOKENS = 128
DECODE_TOKENS = 128

# With the tokens of a training step. Each model also has a shape with the tokens of a decoding step.
MODELS = {
    "deepseek_v3": Shape(tokens=4096, hidden=7168, top_k=8, experts=256, inner=2048),
    "glm_4_5": Shape(tokens=4096, hidden=5120, top_k=8, experts=160, inner=1536),
    "gpt_oss_120b": Shape(tokens=4096, hidden=2880, top_k=4, experts=128, inner=2880),
    "kimi_k2": Shape(tokens=4096, hidden=7168, top_k=8, experts=384, inner=2048),
    "llama_4_maverick": Shape(tokens=4096, hidden=5120, top_k=1, experts=128, inner=8192),
    "mixtral_8x7b": Shape(tokens=4096, hidden=4096, top_k=2, experts=8, inner=14336),
    "qwen3_30b_a3b": Shape(tokens=32768, hidden=2048, top_k=8, experts=128, inner=768),
    "qwen3_moe_235b": Shape(tokens=4096, hidden=4096, top_k=8, experts=128, inner=1536),
    "qwen3_next": Shape(tokens=4096, hidden=2048, top_k=10, experts=512, inner=512),
}

# The local experts of one of four ranks.
_QUARTERS = {
    f"{name}_{experts}_experts": dataclasses.replace(MODELS[name], experts=experts)
    for name, experts in (("deepseek_v3", 64), ("qwen3_moe_235b", 32), ("gpt_oss_120b", 32))
}
_TRAINED = MODELS | _QUARTERS

SHAPES = {
    **_TRAINED,
    **{
        f"{name}_decode": dataclasses.replace(shape, tokens=DECODE_TOKENS) for name, shape in _TRAINED.items()
    },
    "deepseek_v3_decode_16": dataclasses.replace(MODELS["deepseek_v3"], tokens=16),
    "deepseek_v3_decode_1": dataclasses.replace(MODELS["deepseek_v3"], tokens=1),
    # On two ranks, each has the local experts of one of four.
    "deepseek_v3_128_experts_decode": dataclasses.replace(
        MODELS["deepseek_v3"], experts=128, tokens=DECODE_TOKENS
    ),
    "cpu": Shape(tokens=1024, hidden=1024, top_k=8, experts=64, inner=512),
    "cpu_256_tokens": Shape(tokens=256, hidden=1024, top_k=8, experts=64, inner=512),
    "tiny": Shape(tokens=32, hidden=128, top_k=2, experts=16, inner=128),
}
