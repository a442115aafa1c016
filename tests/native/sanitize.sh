#!/usr/bin/env bash
# Runs the CPU handlers under AddressSanitizer + UBSan, in Python and as C++ stress programs, and the
# latter under ThreadSanitizer too. (In Python that one cannot see how XLA, which is not instrumented,
# orders its threads, and would report every buffer.)
set -euo pipefail
cd "$(dirname "$0")/../.."
python=$1

build() { # name, sanitizers
  "$python" -m cmake -S . -B "build/$1" -G Ninja -DJAX_EP_CUDA=OFF -DJAX_EP_SANITIZE="$2" \
    -DPython_EXECUTABLE="$(realpath -s "$python")" -Dnanobind_DIR="$("$python" -m nanobind --cmake_dir)" \
    -DCMAKE_MAKE_PROGRAM="$(dirname "$(realpath -s "$python")")/ninja" >"build/$1.log" 2>&1 ||
    { cat "build/$1.log"; exit 1; }
  "$python" -m cmake --build "build/$1" >>"build/$1.log" 2>&1 || { tail -40 "build/$1.log"; exit 1; }
}
mkdir -p build

echo "ThreadSanitizer: the stress programs"
build sanitize-thread thread
for stress in meeting host_meeting processes; do
  TSAN_OPTIONS=halt_on_error=1 "build/sanitize-thread/${stress}_stress"
done

echo "AddressSanitizer + UBSan: the stress programs"
build sanitize-address address,undefined
export UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1
for stress in meeting host_meeting processes; do
  ASAN_OPTIONS=detect_leaks=0 "build/sanitize-address/${stress}_stress"
done

echo "AddressSanitizer + UBSan: the handlers in Python"
site=build/sanitize-address/site
mkdir -p "$site"
rm -rf "$site/jax_ep" && cp -r jax_ep "$site/jax_ep"
cp build/sanitize-address/_C.*.so "$site/jax_ep/"
# Not the installed package: without -S, the editable install would be found first. Python keeps
# memory until it exits, so leaks cannot be told apart.
packages=$("$python" -c "import sysconfig; print(sysconfig.get_paths()['purelib'])")
export PYTHONPATH="$PWD/$site:$packages"
export ASAN_OPTIONS=detect_leaks=0:halt_on_error=1
export LD_PRELOAD="$(g++ -print-file-name=libasan.so) $(g++ -print-file-name=libubsan.so)"
"$python" -S -P -c "import jax_ep._C as c; assert 'sanitize-address' in c.__file__, c.__file__"
"$python" -S -P -m pytest -p no:cacheprovider -p no:xdist --timeout 600 -k "not xla" \
  tests/ops/test_layout.py tests/ops/test_dispatch.py tests/ops/test_combine.py tests/ops/test_permute.py \
  tests/group/test_group.py tests/errors/test_errors.py tests/ops/test_deepep_by_rank.py tests/ops/test_gradients.py tests/ops/test_active_ranks.py
