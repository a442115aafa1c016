"""Checks the instructions of the kernels for grouped products in a built extension or in object files.

    python tests/native/check_sass.py build/.../_C.abi3.so

Each kernel of engines sm90, sm100 and sm120 must load its operands by TMA and multiply them on the tensor
cores of its architecture. CUTLASS, which makes those of the latter two, compiles kernels without these
instructions if a macro is missing. Needs cuobjdump and nvdisasm on the PATH
(`pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm`), but no GPU.
"""

import argparse
import re
import subprocess
import sys
from collections import Counter

# architecture -> (engine, its kernels' names, its instructions that multiply, the number of its kernels).
# There are three products of two types, and two of FP8.
ENGINES = {
    "90": ("sm90", r"\d(Floats|Fp8)Kernel", r"\b[HQ]GMMA\b", 8),
    "100": ("sm100", "device_kernel", r"\bUTC[HQ]MMA\.2CTA\b", 8),
    "120": ("sm120", "device_kernel", r"\bQMMA\b", 2),
}
LOADS = r"\bUTMALDG\b"


def kernels_of(path: str) -> dict[tuple[str, str], str]:
    """Returns the instructions of the engines' kernels in a file, by architecture and name."""
    sass = subprocess.run(["cuobjdump", "-sass", path], capture_output=True, text=True, check=True).stdout
    kernels, architecture = {}, ""
    for part in re.split(r"^(?=arch = |\s+Function : )", sass, flags=re.MULTILINE):
        if match := re.match(r"arch = sm_(\d+)[af]\b", part):
            architecture = match[1]
        elif part.startswith("arch = "):
            architecture = ""
        elif architecture in ENGINES:
            match = re.match(r"\s+Function : (\S+)", part)
            if match and re.search(ENGINES[architecture][1], match[1]):
                kernels[architecture, match[1]] = part
    return kernels


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("paths", nargs="+", help="the extension, or object files")
    parser.add_argument("--engines", default="sm90,sm100", help="engines that must be there")
    options = parser.parse_args()
    kernels = {key: sass for path in options.paths for key, sass in kernels_of(path).items()}
    failures = []
    for architecture, (engine, _, multiplies, number) in ENGINES.items():
        engine_kernels = {name: sass for (of, name), sass in kernels.items() if of == architecture}
        if not engine_kernels and engine not in options.engines.split(","):
            continue
        counts = Counter()
        for name, sass in engine_kernels.items():
            for pattern in (multiplies, LOADS):
                counts[pattern] += len(re.findall(pattern, sass))
                if not re.search(pattern, sass):
                    failures.append(f"{engine}: no instruction {pattern} in {name[:120]}")
        print(f"{engine}: {len(engine_kernels)} kernels, {counts[multiplies]} MMA, {counts[LOADS]} TMA loads")
        if len(engine_kernels) != number:
            failures.append(f"{engine}: {len(engine_kernels)} kernels, expected {number}")
    print(*failures, sep="\n", end="\n" if failures else "", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
