"""Named shapes of real models, one list for tests and benchmarks."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Shape:
    """T tokens a rank, hidden size H, top-K of E experts."""

    tokens: int
    hidden: int
    top_k: int
    experts: int


SHAPES = {
    "deepseek_v3": Shape(tokens=4096, hidden=7168, top_k=8, experts=256),
    "deepseek_v3_decode": Shape(tokens=128, hidden=7168, top_k=8, experts=256),
    "mixtral_8x7b": Shape(tokens=4096, hidden=4096, top_k=2, experts=8),
    "qwen3_moe_235b": Shape(tokens=4096, hidden=4096, top_k=8, experts=128),
    "cpu": Shape(tokens=1024, hidden=1024, top_k=8, experts=64),
    "tiny": Shape(tokens=32, hidden=64, top_k=2, experts=16),
}
