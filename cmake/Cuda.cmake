# Finds a CUDA compiler if JAX_EP_CUDA requires or allows one, and sets JAX_EP_CUDA_FOUND.
#
# AUTO compiles for CUDA only if this machine has a GPU, or if architectures were requested: the kernels take minutes.
# The compiler is searched in CUDACXX, the PATH, /usr/local/cuda, then NVIDIA's packages from PyPI in the Python that
# builds.
set(JAX_EP_CUDA_FOUND OFF)
if(NOT JAX_EP_CUDA MATCHES "^(AUTO|ON|OFF)$")
  message(FATAL_ERROR "jax_ep: JAX_EP_CUDA must be AUTO, ON or OFF, got '${JAX_EP_CUDA}'")
endif()
if(JAX_EP_CUDA STREQUAL "OFF")
  message(STATUS "jax_ep: CUDA part: off")
  return()
endif()

if(NOT CMAKE_CUDA_COMPILER)
  find_program(JAX_EP_NVCC nvcc HINTS ENV CUDACXX PATHS /usr/local/cuda/bin)
  if(DEFINED ENV{CUDACXX})
    set(CMAKE_CUDA_COMPILER "$ENV{CUDACXX}")
  elseif(JAX_EP_NVCC)
    set(CMAKE_CUDA_COMPILER "${JAX_EP_NVCC}")
  else()
    execute_process(
      COMMAND "${Python_EXECUTABLE}" -c
        "import sysconfig; print(sysconfig.get_paths()['purelib'] + '/nvidia/cu13')"
      OUTPUT_VARIABLE JAX_EP_CUDA_WHEEL OUTPUT_STRIP_TRAILING_WHITESPACE)
    if(EXISTS "${JAX_EP_CUDA_WHEEL}/bin/nvcc")
      set(CMAKE_CUDA_COMPILER "${JAX_EP_CUDA_WHEEL}/bin/nvcc")
      # The wheels keep their libraries in lib, where nvcc does not look.
      set(ENV{LIBRARY_PATH} "${JAX_EP_CUDA_WHEEL}/lib:$ENV{LIBRARY_PATH}")
      link_directories("${JAX_EP_CUDA_WHEEL}/lib")
    endif()
  endif()
endif()

# The device files of NVIDIA's driver, on Linux and on WSL. The Makefile looks for the same ones.
if(JAX_EP_CUDA STREQUAL "AUTO" AND CMAKE_CUDA_COMPILER AND "${CMAKE_CUDA_ARCHITECTURES}$ENV{CUDAARCHS}" STREQUAL ""
    AND NOT EXISTS /dev/nvidiactl AND NOT EXISTS /dev/dxg)
  message(STATUS "jax_ep: CUDA part: off, this machine has no GPU. To compile it with ${CMAKE_CUDA_COMPILER}, set "
    "JAX_EP_CUDA=ON, or set CUDAARCHS to the architectures, such as 90")
  return()
endif()

# A compiler that does not work counts as none, unless it was asked for: then its own error is shown.
if(CMAKE_CUDA_COMPILER AND JAX_EP_CUDA STREQUAL "AUTO")
  set(ENV{CUDACXX} "${CMAKE_CUDA_COMPILER}")
  unset(CMAKE_CUDA_COMPILER)
  include(CheckLanguage)
  check_language(CUDA)
endif()

if(NOT CMAKE_CUDA_COMPILER)
  if(JAX_EP_CUDA STREQUAL "ON")
    message(FATAL_ERROR "jax_ep: JAX_EP_CUDA=ON, but there is no CUDA compiler. Install the CUDA toolkit, or "
      "NVIDIA's packages (pip install nvidia-cuda-nvcc nvidia-cuda-crt nvidia-nvvm nvidia-cuda-runtime "
      "nvidia-cuda-cccl), or set CUDACXX to nvcc, or build for the CPU alone with JAX_EP_CUDA=OFF.")
  endif()
  message(STATUS "jax_ep: CUDA part: off, no working CUDA compiler found (JAX_EP_CUDA=AUTO)")
  return()
endif()

# Asked before the language is enabled, which fails if the compiler does not know an architecture.
execute_process(COMMAND "${CMAKE_CUDA_COMPILER}" --version OUTPUT_VARIABLE JAX_EP_NVCC ERROR_QUIET)
if(JAX_EP_NVCC MATCHES "release ([0-9]+\\.[0-9]+)" AND CMAKE_MATCH_1 VERSION_LESS 12.9)
  if(JAX_EP_CUDA STREQUAL "ON" OR NOT "$ENV{CUDAARCHS}" STREQUAL "")
    message(FATAL_ERROR "jax_ep: the CUDA part needs nvcc 12.9 or newer, ${CMAKE_CUDA_COMPILER} is ${CMAKE_MATCH_1}. "
      "Set CUDACXX to a newer one, or build for the CPU alone with JAX_EP_CUDA=OFF.")
  endif()
  message(STATUS "jax_ep: CUDA part: off, ${CMAKE_CUDA_COMPILER} is ${CMAKE_MATCH_1}, older than 12.9 "
    "(JAX_EP_CUDA=AUTO)")
  return()
endif()

if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
  if(NOT "$ENV{CUDAARCHS}" STREQUAL "")
    # CMake itself reads it in a fresh build tree alone.
    set(CMAKE_CUDA_ARCHITECTURES $ENV{CUDAARCHS} CACHE STRING "GPUs to compile for")
  else()
    set(CMAKE_CUDA_ARCHITECTURES 80 90 100)
  endif()
endif()
enable_language(CUDA)
set(CMAKE_CUDA_STANDARD 17)
set(CMAKE_CUDA_STANDARD_REQUIRED ON)
set(JAX_EP_CUDA_FOUND ON)
message(STATUS "jax_ep: CUDA part: ${CMAKE_CUDA_COMPILER} ${CMAKE_CUDA_COMPILER_VERSION}, "
  "architectures ${CMAKE_CUDA_ARCHITECTURES}")

# Products on Hopper and Blackwell GPUs use instructions that only sm_90a and the families of sm_100 and sm_120 have.
# On Blackwell CUTLASS makes them.
set(JAX_EP_PRODUCTS_SM90 OFF)
set(JAX_EP_PRODUCTS_SM100 OFF)
set(JAX_EP_PRODUCTS_SM120 OFF)
set(JAX_EP_KNOWN_ARCHITECTURES ${CMAKE_CUDA_ARCHITECTURES})
if(CMAKE_CUDA_ARCHITECTURES STREQUAL "native")
  set(JAX_EP_KNOWN_ARCHITECTURES ${CMAKE_CUDA_ARCHITECTURES_NATIVE})
endif()
foreach(architecture IN LISTS JAX_EP_KNOWN_ARCHITECTURES)
  if(architecture MATCHES "^(90a?(-real|-virtual)?|all|all-major)$")
    set(JAX_EP_PRODUCTS_SM90 ON)
  endif()
  if(architecture MATCHES "^(10[03][af]?(-real|-virtual)?|all|all-major)$")
    set(JAX_EP_PRODUCTS_SM100 ON)
  endif()
  if(architecture MATCHES "^(12[01][af]?(-real|-virtual)?|all|all-major)$")
    set(JAX_EP_PRODUCTS_SM120 ON)
  endif()
endforeach()
message(STATUS "jax_ep: products for sm_90a: ${JAX_EP_PRODUCTS_SM90}, for sm_100f: ${JAX_EP_PRODUCTS_SM100}, "
  "for sm_120f: ${JAX_EP_PRODUCTS_SM120}")
if(NOT JAX_EP_PRODUCTS_SM100 AND NOT JAX_EP_PRODUCTS_SM120)
  message(STATUS "jax_ep: CUTLASS: not needed without architectures 100, 103, 120 and 121")
  return()
endif()

set(JAX_EP_CUTLASS "" CACHE PATH "CUTLASS's folder, or its include folder; empty: that of nvidia-cutlass from PyPI")
if(JAX_EP_CUTLASS)
  set(JAX_EP_CUTLASS_HINTS "${JAX_EP_CUTLASS}" "${JAX_EP_CUTLASS}/include")
else()
  execute_process(
    COMMAND "${Python_EXECUTABLE}" -c
      "from importlib.util import find_spec; spec = find_spec('cutlass_library'); \
print(spec.submodule_search_locations[0] + '/source/include' if spec else 'the packages of this Python')"
    OUTPUT_VARIABLE JAX_EP_CUTLASS_HINTS OUTPUT_STRIP_TRAILING_WHITESPACE)
endif()
unset(JAX_EP_CUTLASS_INCLUDE CACHE)
find_path(JAX_EP_CUTLASS_INCLUDE cutlass/version.h PATHS ${JAX_EP_CUTLASS_HINTS} NO_DEFAULT_PATH)
if(NOT JAX_EP_CUTLASS_INCLUDE)
  message(FATAL_ERROR "jax_ep: architectures 100, 103, 120 and 121 need the headers of CUTLASS, which are not in "
    "${JAX_EP_CUTLASS_HINTS}. Install them (pip install nvidia-cutlass==4.2.0.0), or set JAX_EP_CUTLASS to a "
    "folder that has them (-Ccmake.define.JAX_EP_CUTLASS=...), or build for other architectures.")
endif()
jax_ep_read_version("${JAX_EP_CUTLASS_INCLUDE}/cutlass/version.h" CUTLASS JAX_EP_CUTLASS_VERSION)
if(JAX_EP_CUTLASS_VERSION VERSION_LESS 4.2)
  message(FATAL_ERROR "jax_ep: CUTLASS must be 4.2 or newer, that in ${JAX_EP_CUTLASS_INCLUDE} is "
    "${JAX_EP_CUTLASS_VERSION}")
endif()
message(STATUS "jax_ep: CUTLASS ${JAX_EP_CUTLASS_VERSION} in ${JAX_EP_CUTLASS_INCLUDE}")
