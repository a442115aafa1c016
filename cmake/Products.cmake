# Engines for grouped products: the list of their kernels, and how these are compiled.

# CUTLASS's kernels of each engine, as GroupedDot and Operands (ffi/kernels/products/engines.h). Each element of a list
# is compiled as one file, in parallel with the others. One file has several kernels, because the compiler spends most of
# its time on headers.
set(JAX_EP_KERNELS_SM100
  "kRows kF16, kRows kBF16, kRowsTransposed kF16, kRowsTransposed kBF16, kWeights kF16, kWeights kBF16"
  "kRowsTransposed kFp8, kWeights kFp8")
set(JAX_EP_KERNELS_SM120
  "kRowsTransposed kFp8, kWeights kFp8")
# Kernels of this project, in the engine's folder.
set(JAX_EP_FILES_SM90 few_rows.cu floats.cu fp8.cu tensor_map.cu)

# Writes a file that instantiates kernels of an engine, and sets `file` to its name.
function(jax_ep_write_instances engine number kernels file)
  string(REGEX REPLACE "([A-Za-z0-9]+) ([A-Za-z0-9]+)(, )?"
    "template struct ProductKernel<GroupedDot::\\1, Operands::\\2>;\n" instances "${kernels}")
  set(name "${CMAKE_CURRENT_BINARY_DIR}/products/${engine}_${number}.cu")
  configure_file("${CMAKE_CURRENT_SOURCE_DIR}/cmake/ProductKernels.cu.in" "${name}" @ONLY)
  set(${file} "${name}" PARENT_SCOPE)
endfunction()

# Adds an engine to jax_ep_cuda. Only its files may use one architecture's instructions. The architecture is not
# passed as CUDA_ARCHITECTURES, because CMake before 4.1 does not know families such as 100f.
function(jax_ep_add_products engine architecture)
  string(TOUPPER "${engine}" ENGINE)
  list(TRANSFORM JAX_EP_FILES_${ENGINE} PREPEND "ffi/kernels/products/${engine}/" OUTPUT_VARIABLE files)
  set(number 0)
  foreach(kernels IN LISTS JAX_EP_KERNELS_${ENGINE})
    jax_ep_write_instances(${engine} ${number} "${kernels}" file)
    list(APPEND files "${file}")
    math(EXPR number "${number} + 1")
  endforeach()
  set(library "jax_ep_products_${engine}")
  add_library(${library} OBJECT ${files})
  set_target_properties(${library} PROPERTIES CUDA_ARCHITECTURES OFF)
  target_include_directories(${library} PRIVATE ffi)
  if(JAX_EP_KERNELS_${ENGINE})
    target_include_directories(${library} SYSTEM PRIVATE "${JAX_EP_CUTLASS_INCLUDE}")
    target_compile_definitions(_C PRIVATE JAX_EP_CUTLASS_VERSION="${JAX_EP_CUTLASS_VERSION}")
    target_compile_options(${library} PRIVATE --expt-relaxed-constexpr)
  endif()
  target_compile_options(${library} PRIVATE
    "--generate-code=arch=compute_${architecture},code=[sm_${architecture}]" -Xcompiler=-Wall)
  target_sources(jax_ep_cuda PRIVATE $<TARGET_OBJECTS:${library}>)
  target_compile_definitions(jax_ep_cuda PRIVATE JAX_EP_PRODUCTS_${ENGINE})
endfunction()
