#!/usr/bin/env bash
# Builds a wheel with each Python that is named, makes it a manylinux wheel in dist/, and tries it in a fresh
# environment: installs an older version from an index, upgrades it, runs the README's example, and uninstalls it:
#
#     release/wheels.sh python3.11 python3.12
#
# The wheel of Python 3.12 has the stable ABI, so it also serves all newer ones. BIN is the folder where auditwheel
# is. WHEEL_OPTIONS are those of `pip wheel`, by default a build folder that no other build uses, so that
# nothing configured there for another purpose goes into a wheel. TRY_WITH are the Pythons that each wheel is tried
# with, by default the one that built it; JAX_EP_CUDA=OFF leaves the CUDA part out.
set -euo pipefail
cd "$(dirname "$0")/.."
bin=$(realpath "${BIN:-.venv/bin}")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

for python in "$@"; do
  rm -rf "$work/built" "$work/repaired"
  # shellcheck disable=SC2086
  "$python" -m pip wheel --quiet --no-deps "--config-settings=cmake.define.JAX_EP_CUDA=${JAX_EP_CUDA:-ON}" \
    ${WHEEL_OPTIONS:---config-settings=build-dir=build/wheels/{wheel_tag\}} --wheel-dir "$work/built" .
  # The driver belongs to the host. Everything else that is not part of every Linux must be inside.
  PATH="$bin:$PATH" "$bin/auditwheel" repair --exclude libcuda.so.1 --wheel-dir "$work/repaired" \
    "$work"/built/*.whl
  wheel=$(echo "$work"/repaired/*.whl)

  "$bin/python" release/index.py "$wheel" "$work/simple"
  from_index=(install --isolated --index-url "file://$work/simple" --no-deps --no-compile)
  for user in ${TRY_WITH:-$python}; do
    rm -rf "$work/fresh"
    "$user" -m venv "$work/fresh"
    fresh="$work/fresh/bin/python"
    pip=("$fresh" -m pip --quiet --disable-pip-version-check)
    version=$(basename "$wheel" | cut -d- -f2)
    "${pip[@]}" "${from_index[@]}" "jax-ep<$version"
    "${pip[@]}" "${from_index[@]}" --upgrade "jax-ep==$version"
    "${pip[@]}" install jax-ep  # it is there; this installs what it depends on
    JAX_PLATFORMS=cpu "$fresh" release/try_wheel.py
    "${pip[@]}" uninstall --yes jax-ep
    left=$(find "$work/fresh" -iname "jax[_-]ep*")
    if [[ -n $left ]]; then
      echo "release/wheels.sh: pip uninstall leaves files: $left" >&2
      exit 1
    fi
  done

  mkdir -p dist
  mv "$wheel" dist/
  "$fresh" release/describe_wheel.py "dist/$(basename "$wheel")"
done
