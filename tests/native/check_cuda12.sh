#!/usr/bin/env bash
# Compiles the CUDA part with the headers and the assembler of CUDA 12.9, for sm_90, and links nothing:
#
#     tests/native/check_cuda12.sh .venv/bin/python [the .cu files, by default all]
#
# PyPI has these parts of CUDA 12.9, but not its nvcc. So the nvcc of the PATH, which is that of CUDA 13.0, compiles
# kernels to PTX, and the assembler checks that this is PTX of CUDA 12.9. Needs the dependency groups `build`, `cuda`
# and `cuda12`.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=$1
shift
if (($#)); then kernels=("$@"); else mapfile -t kernels < <(find ffi -name '*.cu' | sort); fi
packages=$("$python" -c "import nvidia; print(nvidia.__path__[0])")
includes=(-Iffi "-I$packages/cuda_runtime/include" "-I$packages/cuda_nvcc/include" "-I$packages/cuda_cccl/include"
  -isystem "$packages/nccl/include")
defines=(-DJAX_EP_WITH_CUDA -DJAX_EP_WITH_NCCL -DJAX_EP_PRODUCTS_SM90 '-DJAX_EP_CUDA_ARCHITECTURES="90"')
mapfile -t bindings < <("$python" -c "
import jax.ffi, nanobind, sysconfig
for folder in (jax.ffi.include_dir(), nanobind.include_dir(), sysconfig.get_paths()['include']):
    print('-isystem', folder, sep='\n')")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

check_host() { # file
  g++ -std=c++17 -fsyntax-only -Wall -Werror "${includes[@]}" "${bindings[@]}" "${defines[@]}" "$1"
}

check_kernels() { # file
  local architecture=90 ptx
  [[ $1 == */sm90/* ]] && architecture=90a
  ptx=$(mktemp "$work/XXXXXX.ptx")
  nvcc -std=c++17 "-arch=compute_$architecture" -ptx "${includes[@]}" "${defines[@]}" -o "$ptx" "$1"
  sed -i 's/^\.version .*/.version 8.8/' "$ptx"
  "$packages/cuda_nvcc/bin/ptxas" -O1 "-arch=sm_$architecture" -o /dev/null "$ptx" 2> "$ptx.log" ||
    { cat "$ptx.log" >&2; return 1; }
}

# Runs a command in the background, one for each core at a time.
pids=()
start() {
  while (($(jobs -rp | wc -l) >= $(nproc))); do wait -n || true; done
  "$@" &
  pids+=($!)
}

echo 'static_assert(CUDART_VERSION == 12090, "these are not the headers of CUDA 12.9");' > "$work/version.cu"
start check_kernels "$work/version.cu"
for file in ffi/module.cc ffi/handlers/gpu/*.cc ffi/runtime/{gpu,net}/*.cc ffi/kernels/products/*.cc; do
  start check_host "$file"
done
for file in "${kernels[@]}"; do
  start check_kernels "$file"
done
failed=0
for pid in "${pids[@]}"; do wait "$pid" || failed=1; done
((failed == 0)) || exit 1
echo "CUDA 12.9 compiles the host code and ${#kernels[@]} files of kernels"
