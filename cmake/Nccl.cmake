# Finds the headers of NCCL's device API, as JAX_EP_NCCL says, and sets JAX_EP_NCCL_INCLUDE; empty where they are
# not needed or not there: then hops between hosts go by XLA's collectives. Nothing is linked.
set(JAX_EP_NCCL "" CACHE PATH
  "NCCL's include folder, OFF, or empty: that of nvidia-nccl-cu13 from PyPI in the Python that builds, if it is there")
unset(JAX_EP_NCCL_INCLUDE CACHE)
set(JAX_EP_NCCL_INCLUDE "")
if(NOT JAX_EP_CUDA_FOUND)
  return()
endif()
if(JAX_EP_NCCL STREQUAL "OFF")
  message(STATUS "jax_ep: NCCL's device API: off")
  return()
endif()

set(JAX_EP_NCCL_HINT "${JAX_EP_NCCL}")
if(NOT JAX_EP_NCCL)
  execute_process(
    COMMAND "${Python_EXECUTABLE}" -c
      "from importlib.util import find_spec; spec = find_spec('nvidia'); \
print(next((f'{at}/nccl/include' for at in (spec.submodule_search_locations if spec else ()) \
if __import__('os').path.exists(f'{at}/nccl/include')), 'the packages of this Python'))"
    OUTPUT_VARIABLE JAX_EP_NCCL_HINT OUTPUT_STRIP_TRAILING_WHITESPACE)
endif()
if(NOT EXISTS "${JAX_EP_NCCL_HINT}/nccl_device.h")
  if(JAX_EP_NCCL)
    message(FATAL_ERROR "jax_ep: JAX_EP_NCCL must be a folder with nccl.h and nccl_device.h, as those of "
      "nvidia-nccl-cu13 2.30.7 or newer are, or OFF; got '${JAX_EP_NCCL}'")
  endif()
  message(STATUS "jax_ep: NCCL's device API: off, no headers in ${JAX_EP_NCCL_HINT} "
    "(pip install nvidia-nccl-cu13==2.30.7)")
  return()
endif()

jax_ep_read_version("${JAX_EP_NCCL_HINT}/nccl.h" NCCL JAX_EP_NCCL_VERSION)
if(JAX_EP_NCCL_VERSION VERSION_LESS 2.30.7)
  message(FATAL_ERROR "jax_ep: NCCL must be 2.30.7 or newer, that in ${JAX_EP_NCCL_HINT} is "
    "${JAX_EP_NCCL_VERSION}; JAX_EP_NCCL=OFF builds without it")
endif()
set(JAX_EP_NCCL_INCLUDE "${JAX_EP_NCCL_HINT}")
message(STATUS "jax_ep: NCCL ${JAX_EP_NCCL_VERSION} in ${JAX_EP_NCCL_INCLUDE}: kernels run with it and newer ones")
