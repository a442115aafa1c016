"""Grouped products of DeepGEMM, for comparison, in a process of their own.

`times` starts that process, which runs this module and imports torch and DeepGEMM. JAX has reserved most of
the memory of this process's GPU, and the other process uses the rest.
"""

import dataclasses
import importlib
import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from jax_ep.bench import measure

PACKAGES = ("torch", "deep_gemm")
TIMEOUT_S = 600.0  # of a process; DeepGEMM compiles each kernel at its first call
TILE = 128  # rows; DeepGEMM needs groups that are multiples of it


@dataclasses.dataclass(frozen=True)
class Case:
    """A product of rows [C, depth] and matrices [L, depth, width]."""

    dtype: str  # "bfloat16" or "FP8"
    depth: int
    width: int


def missing() -> str | None:
    """Returns the name of a package that is not installed, if any. Imports none of them."""
    return next((name for name in PACKAGES if importlib.util.find_spec(name) is None), None)


def times(
    cases: list[Case], group_sizes: np.ndarray, repeats: int, pause_s: float
) -> tuple[list[float], str | None]:
    """Returns the microseconds of each case until one fails, and the reason of the failure."""
    request = {
        "cases": [dataclasses.asdict(case) for case in cases],
        "group_sizes": group_sizes.tolist(),
        "repeats": repeats,
        "pause_s": pause_s,
    }
    python = [sys.executable, *(["-P"] if sys.flags.safe_path else [])]
    try:
        done = subprocess.run(
            [*python, "-m", "jax_ep.bench.deep_gemm"],
            input=json.dumps(request),
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        return [], f"its process did not end within {TIMEOUT_S:g} s"
    # The packages may print lines, too.
    answers = [line for line in done.stdout.splitlines() if line.startswith('{"us": ')]
    if not answers:
        last_line = (done.stderr.splitlines() or [""])[-1]
        return [], f"its process ended with status {done.returncode}: {last_line}"
    answer = json.loads(answers[-1])
    return answer["us"], answer["error"]


def main() -> None:
    """Reads a request from stdin, and prints the times of its cases as a line of JSON."""
    request = json.load(sys.stdin)
    us, error = [], None
    try:
        for time_us in _times(request):
            us.append(time_us)
    except Exception as failure:  # whatever these packages raise, the benchmark reports it and goes on
        error = f"{type(failure).__name__}: {(str(failure).splitlines() or [''])[0]}"
    print(json.dumps({"us": us, "error": error}))


def _times(request: dict[str, Any]) -> Iterator[float]:
    torch, deep_gemm = map(importlib.import_module, PACKAGES)
    for fields in request["cases"]:
        run = _product(torch, deep_gemm, Case(**fields), request["group_sizes"])
        (us,) = measure.bursts_us(
            [run], lambda _: torch.cuda.synchronize(), request["repeats"], request["pause_s"]
        )
        del run  # frees its operands before the next ones are made
        yield us


def _product(torch: Any, deep_gemm: Any, case: Case, group_sizes: list[int]) -> Callable[[], None]:
    """Returns a function that computes a product of random operands."""
    group_of_row = []
    for group, size in enumerate(group_sizes):
        group_of_row += [group] * size + [-1] * (-size % TILE)
    rows, groups = len(group_of_row), len(group_sizes)
    out = torch.empty(rows, case.width, device="cuda", dtype=torch.bfloat16)
    indices = torch.tensor(group_of_row, device="cuda", dtype=torch.int32)

    def normal(*shape: int) -> Any:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

    def fp8(*shape: int) -> Any:
        return (normal(*shape) * 128).to(torch.float8_e4m3fn)  # uses most of its range, as if quantized

    def scales(*shape: int) -> Any:
        return torch.rand(*shape, device="cuda") * 0.01 + 0.001

    if case.dtype == "bfloat16":
        x, w = normal(rows, case.depth), normal(groups, case.width, case.depth)
        return lambda: deep_gemm.m_grouped_bf16_gemm_nt_contiguous(x, w, out, indices)
    x_scales = deep_gemm.get_mn_major_tma_aligned_tensor(scales(rows, case.depth // 128))
    w = torch.empty(groups, case.width, case.depth, device="cuda", dtype=torch.float8_e4m3fn)
    for group in range(groups):  # one by one, because bfloat16 values of all would take twice their memory
        w[group] = fp8(case.width, case.depth)
    x, w_scales = fp8(rows, case.depth), scales(groups, case.width // 128, case.depth // 128)
    return lambda: deep_gemm.m_grouped_fp8_gemm_nt_contiguous((x, x_scales), (w, w_scales), out, indices)


if __name__ == "__main__":
    main()
