# SPDX-License-Identifier: Apache-2.0
# Language level, warnings and sanitizers, attached to every target through farspan_flags.

option(FARSPAN_TESTS "Build the tests" ON)
option(FARSPAN_BENCH "Build the benchmarks" ON)
set(FARSPAN_CUDA AUTO CACHE STRING "Build for NVIDIA GPUs: ON, OFF, or AUTO: where there is a CUDA toolkit")
set_property(CACHE FARSPAN_CUDA PROPERTY STRINGS AUTO ON OFF)
set(FARSPAN_SANITIZER "" CACHE STRING "Sanitizers to compile in, as for -fsanitize= (empty: none)")

if(NOT CMAKE_BUILD_TYPE)
  set(CMAKE_BUILD_TYPE Release CACHE STRING "" FORCE)
endif()

find_program(FARSPAN_CCACHE ccache)
if(FARSPAN_CCACHE)
  set(CMAKE_CXX_COMPILER_LAUNCHER ${FARSPAN_CCACHE})
endif()

add_library(farspan_flags INTERFACE)
target_compile_features(farspan_flags INTERFACE cxx_std_20)
target_include_directories(farspan_flags INTERFACE ${CMAKE_SOURCE_DIR}/src)
target_compile_options(farspan_flags INTERFACE
  $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra -Wpedantic -Wshadow -Wconversion -Wno-sign-conversion -Werror>
  $<$<COMPILE_LANGUAGE:CUDA>:-std=c++20 -Xcompiler=-Wall,-Wextra -Werror=all-warnings --expt-relaxed-constexpr -DFMT_USE_CONSTEXPR=1 -Xfatbin=-compress-all>)
if(FARSPAN_SANITIZER)
  target_compile_options(farspan_flags INTERFACE -fsanitize=${FARSPAN_SANITIZER} -fno-omit-frame-pointer)
  target_link_options(farspan_flags INTERFACE -fsanitize=${FARSPAN_SANITIZER})
  # GCC takes members of std::optional for uninitialised where sanitizers keep it from following the flag (bug 80635).
  target_compile_options(farspan_flags INTERFACE $<$<CXX_COMPILER_ID:GNU>:-Wno-maybe-uninitialized>)
  if(FARSPAN_SANITIZER MATCHES "undefined")
    target_compile_options(farspan_flags INTERFACE -fno-sanitize-recover=undefined)
  endif()
endif()
set(CMAKE_CXX_EXTENSIONS OFF)
