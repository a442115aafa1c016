# The XLA FFI headers that jaxlib ships, as the target jax::ffi.
#
# They come from the Python that builds, so the oldest supported jaxlib (pinned in pyproject.toml)
# decides the FFI version: an extension built against newer headers breaks older runtimes.
find_package(Python 3.11 REQUIRED COMPONENTS Interpreter Development.Module
  OPTIONAL_COMPONENTS Development.SABIModule)
execute_process(
  COMMAND "${Python_EXECUTABLE}" -c "import jax.ffi; print(jax.ffi.include_dir())"
  OUTPUT_VARIABLE JAX_FFI_INCLUDE_DIR OUTPUT_STRIP_TRAILING_WHITESPACE
  RESULT_VARIABLE JAX_FFI_RESULT ERROR_VARIABLE JAX_FFI_ERROR)
if(NOT JAX_FFI_RESULT EQUAL 0)
  message(FATAL_ERROR "jax_ep: the XLA FFI headers come with jaxlib, but ${Python_EXECUTABLE} cannot "
    "import jax.ffi. Install jax there, or build with `pip install .`.\n${JAX_FFI_ERROR}")
endif()
message(STATUS "jax_ep: XLA FFI headers in ${JAX_FFI_INCLUDE_DIR}")

add_library(jax_ffi INTERFACE)
add_library(jax::ffi ALIAS jax_ffi)
target_include_directories(jax_ffi SYSTEM INTERFACE "${JAX_FFI_INCLUDE_DIR}")
