# SPDX-License-Identifier: Apache-2.0
# CUDA, cuBLASLt, cuDNN with its C++ frontend, and NCCL: all optional, each found or not. Sets FARSPAN_WITH_CUDA,
# FARSPAN_WITH_CUDNN, FARSPAN_WITH_NCCL and the line that the summary prints.

set(FARSPAN_WITH_CUDA OFF)
set(FARSPAN_WITH_CUDNN OFF)
set(FARSPAN_CUDNN "")
set(FARSPAN_CUDNN_INCLUDES "")
set(FARSPAN_WITH_NCCL OFF)
set(FARSPAN_GPU_SUMMARY "none: no CUDA toolkit (nvcc) was found, so this build is for CPUs only")

if(FARSPAN_CUDA STREQUAL "OFF")
  set(FARSPAN_GPU_SUMMARY "none: FARSPAN_CUDA is OFF")
  return()
endif()

include(CheckLanguage)
# Beside the PATH: where NVIDIA's installers put it, and where scripts/install-cuda does.
set(FARSPAN_LOCAL_CUDA ${CMAKE_SOURCE_DIR}/build/cuda)
if(NOT CMAKE_CUDA_COMPILER)
  find_program(FARSPAN_NVCC nvcc HINTS /usr/local/cuda/bin ${FARSPAN_LOCAL_CUDA}/bin)
  if(FARSPAN_NVCC)
    set(CMAKE_CUDA_COMPILER ${FARSPAN_NVCC})
  endif()
endif()
# The architectures to build for; 90a: Hopper with its own matrix instructions.
if(NOT CMAKE_CUDA_ARCHITECTURES)
  set(CMAKE_CUDA_ARCHITECTURES 90a)
endif()
check_language(CUDA)
if(NOT CMAKE_CUDA_COMPILER)
  if(FARSPAN_CUDA STREQUAL "ON")
    message(FATAL_ERROR "FARSPAN_CUDA is ON, but no nvcc was found; put it on the PATH or set CMAKE_CUDA_COMPILER")
  endif()
  return()
endif()
enable_language(CUDA)
if(FARSPAN_CCACHE)
  set(CMAKE_CUDA_COMPILER_LAUNCHER ${FARSPAN_CCACHE})
endif()
find_package(CUDAToolkit REQUIRED)
set(FARSPAN_WITH_CUDA ON)
# Libraries that are opened by name, cuBLASLt among them, are looked for there too.
list(APPEND CMAKE_BUILD_RPATH ${CUDAToolkit_LIBRARY_DIR})

find_path(FARSPAN_CUDNN_INCLUDE cudnn.h HINTS ${CUDAToolkit_INCLUDE_DIRS})
find_library(FARSPAN_CUDNN_LIBRARY cudnn HINTS ${CUDAToolkit_LIBRARY_DIR})
find_path(FARSPAN_CUDNN_FRONTEND_INCLUDE cudnn_frontend.h HINTS ${FARSPAN_LOCAL_CUDA}/include)
if(FARSPAN_CUDNN_INCLUDE AND FARSPAN_CUDNN_LIBRARY AND FARSPAN_CUDNN_FRONTEND_INCLUDE)
  set(FARSPAN_WITH_CUDNN ON)
  # Recent frontends compile a kernel of their own at run time, so they need NVRTC whether it is used or not.
  set(FARSPAN_CUDNN ${FARSPAN_CUDNN_LIBRARY} CUDA::nvrtc)
  set(FARSPAN_CUDNN_INCLUDES ${FARSPAN_CUDNN_INCLUDE} ${FARSPAN_CUDNN_FRONTEND_INCLUDE})
endif()
find_path(FARSPAN_NCCL_INCLUDE nccl.h HINTS ${CUDAToolkit_INCLUDE_DIRS})
# The library itself is loaded by the program that uses it.
if(FARSPAN_NCCL_INCLUDE)
  set(FARSPAN_WITH_NCCL ON)
endif()

set(FARSPAN_GPU_SUMMARY "CUDA ${CUDAToolkit_VERSION} for sm_${CMAKE_CUDA_ARCHITECTURES}")
foreach(part CUDNN NCCL)
  if(FARSPAN_WITH_${part})
    string(APPEND FARSPAN_GPU_SUMMARY ", ${part}")
  else()
    string(APPEND FARSPAN_GPU_SUMMARY ", no ${part}")
  endif()
endforeach()
