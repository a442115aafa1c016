# Writes a bill of materials (CycloneDX, PEP 770) into the wheel's metadata: the third-party code in the extension.
# licenses/ has a file for each name. A build without scikit-build-core makes no wheel, and so has no place for it.
if(NOT SKBUILD_METADATA_DIR)
  return()
endif()

set(JAX_EP_COMPONENTS "")
set(JAX_EP_COMPONENT_NAMES "")
function(jax_ep_add_component name version license purl description)
  string(CONFIGURE [[{"type": "library", "bom-ref": "@name@", "name": "@name@", "version": "@version@",
     "description": "@description@", "licenses": [{"expression": "@license@"}], "purl": "@purl@"}]] component @ONLY)
  list(APPEND JAX_EP_COMPONENTS "${component}")
  list(APPEND JAX_EP_COMPONENT_NAMES "\"${name}\"")
  set(JAX_EP_COMPONENTS "${JAX_EP_COMPONENTS}" PARENT_SCOPE)
  set(JAX_EP_COMPONENT_NAMES "${JAX_EP_COMPONENT_NAMES}" PARENT_SCOPE)
endfunction()

execute_process(COMMAND "${Python_EXECUTABLE}" -c "import importlib.metadata as m; print(m.version('jaxlib'), end='')"
  OUTPUT_VARIABLE version COMMAND_ERROR_IS_FATAL ANY)
jax_ep_add_component(XLA "${version}" Apache-2.0 "pkg:pypi/jaxlib@${version}" "the FFI headers that jaxlib ships")
jax_ep_add_component(nanobind "${nanobind_VERSION}" BSD-3-Clause "pkg:github/wjakob/nanobind@v${nanobind_VERSION}"
  "headers and library, linked statically")
jax_ep_read_version("${NB_DIR}/ext/robin_map/include/tsl/robin_growth_policy.h" TSL_RH_VERSION version)
jax_ep_add_component(robin-map "${version}" MIT "pkg:github/tessil/robin-map@v${version}" "headers, in nanobind")
if(JAX_EP_CUDA_FOUND)
  find_file(JAX_EP_CUDART_HEADER cuda_runtime_api.h PATHS ${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES} NO_DEFAULT_PATH)
  jax_ep_read_packed_version("${JAX_EP_CUDART_HEADER}" CUDART_VERSION version 1000 10)
  jax_ep_add_component(CUDA "${version}" LicenseRef-NVIDIA-CUDA-EULA "pkg:generic/nvidia/cuda-runtime@${version}"
    "headers and runtime, linked statically")
  find_file(JAX_EP_CCCL_HEADER cuda/std/__cccl/version.h PATHS ${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES}
    PATH_SUFFIXES cccl NO_DEFAULT_PATH)
  jax_ep_read_packed_version("${JAX_EP_CCCL_HEADER}" CCCL_VERSION version 1000000 1000 1)
  jax_ep_add_component(CCCL "${version}" "Apache-2.0 WITH LLVM-exception" "pkg:github/nvidia/cccl@v${version}"
    "headers of libcu++")
endif()
if(JAX_EP_NCCL_INCLUDE)
  jax_ep_add_component(NCCL "${JAX_EP_NCCL_VERSION}" Apache-2.0 "pkg:generic/nvidia/nccl@${JAX_EP_NCCL_VERSION}"
    "headers of its device API")
endif()
if(JAX_EP_CUTLASS_INCLUDE)
  jax_ep_add_component(CUTLASS "${JAX_EP_CUTLASS_VERSION}" BSD-3-Clause
    "pkg:github/nvidia/cutlass@v${JAX_EP_CUTLASS_VERSION}" "headers")
endif()

list(JOIN JAX_EP_COMPONENTS ",\n    " JAX_EP_COMPONENTS)
list(JOIN JAX_EP_COMPONENT_NAMES ", " JAX_EP_COMPONENT_NAMES)
configure_file("${CMAKE_CURRENT_SOURCE_DIR}/cmake/sbom.cdx.json.in" "${CMAKE_CURRENT_BINARY_DIR}/jax_ep.cdx.json" @ONLY)
install(FILES "${CMAKE_CURRENT_BINARY_DIR}/jax_ep.cdx.json" DESTINATION "${SKBUILD_METADATA_DIR}/sboms")
