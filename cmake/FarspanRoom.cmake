# SPDX-License-Identifier: Apache-2.0
# farspan_room(NAME [DEPENDS rooms and libraries...] [PRIVATE libraries...] [INCLUDES folders...] [WITHOUT sources...]): one static library per folder of src/, made of its sources.
# WITHOUT: paths under the folder of sources that stand in for one another, those not wanted. In folders named cuda,
# absent.cpp stands in for all else where CUDA is not built, and so it is with cudnn and nccl.

function(farspan_room name)
  cmake_parse_arguments(ROOM "" "" "DEPENDS;PRIVATE;INCLUDES;WITHOUT" ${ARGN})
  file(GLOB_RECURSE sources CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/${name}/*.cpp)
  if(FARSPAN_WITH_CUDA)
    file(GLOB_RECURSE cuda_sources CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/${name}/*.cu)
    list(APPEND sources ${cuda_sources})
    list(APPEND ROOM_DEPENDS CUDA::cudart_static)
  endif()
  foreach(part cuda cudnn nccl)
    string(TOUPPER ${part} option)
    if(FARSPAN_WITH_${option})
      list(FILTER sources EXCLUDE REGEX "/${part}/absent\\.cpp$")
    else()
      list(FILTER sources EXCLUDE REGEX "/${part}/([^a]|a[^b]|ab[^s]|abs[^e])[^/]*$")
    endif()
  endforeach()
  list(TRANSFORM ROOM_WITHOUT PREPEND ${CMAKE_CURRENT_SOURCE_DIR}/${name}/)
  if(ROOM_WITHOUT)
    list(REMOVE_ITEM sources ${ROOM_WITHOUT})
  endif()
  if(sources)
    add_library(farspan_${name} STATIC ${sources})
    target_link_libraries(farspan_${name} PUBLIC farspan_flags ${ROOM_DEPENDS} PRIVATE ${ROOM_PRIVATE})
    target_include_directories(farspan_${name} SYSTEM PRIVATE ${ROOM_INCLUDES})
  else()
    add_library(farspan_${name} INTERFACE)
    target_link_libraries(farspan_${name} INTERFACE farspan_flags ${ROOM_DEPENDS})
  endif()
endfunction()

# farspan_tests(FOLDER TIMEOUT seconds PROCESSORS n LINK libraries... [ON_CUDA]): every FOLDER/x_test.cpp becomes the
# program test_FOLDER_x, run by ctest as FOLDER.x; with ON_CUDA, on a machine with a GPU, once more as cuda.FOLDER.x, with
# FARSPAN_TEST_DEVICE=cuda in its environment.
function(farspan_tests folder)
  cmake_parse_arguments(T "ON_CUDA" "TIMEOUT;PROCESSORS" "LINK" ${ARGN})
  file(GLOB sources CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/${folder}/*_test.cpp)
  foreach(source ${sources})
    get_filename_component(stem ${source} NAME_WE)
    string(REGEX REPLACE "_test$" "" stem ${stem})
    set(target test_${folder}_${stem})
    add_executable(${target} ${source})
    target_include_directories(${target} PRIVATE ${CMAKE_SOURCE_DIR})
    # What a test itself computes is little; optimising it takes longer than running it.
    target_compile_options(${target} PRIVATE $<$<CONFIG:Release>:-O1>)
    target_link_libraries(${target} PRIVATE ${T_LINK} GTest::gmock GTest::gtest GTest::gtest_main)
    set(environment
      FARSPAN_PROGRAM=${CMAKE_BINARY_DIR}/farspan FARSPAN_SOURCE=${CMAKE_SOURCE_DIR} FARSPAN_MPIRUN=${MPIEXEC_EXECUTABLE})
    add_test(NAME ${folder}.${stem} COMMAND ${target})
    set_tests_properties(${folder}.${stem} PROPERTIES TIMEOUT ${T_TIMEOUT} PROCESSORS ${T_PROCESSORS} LABELS ${folder}
      ENVIRONMENT "${environment}")
    if(T_ON_CUDA AND FARSPAN_GPU_PRESENT)
      add_test(NAME cuda.${folder}.${stem} COMMAND ${target})
      set_tests_properties(cuda.${folder}.${stem} PROPERTIES TIMEOUT ${T_TIMEOUT} PROCESSORS ${T_PROCESSORS} LABELS cuda
        ENVIRONMENT "${environment};FARSPAN_TEST_DEVICE=cuda")
    endif()
  endforeach()
endfunction()

# farspan_mpi_test(FOLDER STEM PROCESSES...): runs the program test_FOLDER_STEM under mpirun with each number of processes.
function(farspan_mpi_test folder stem)
  set(target test_${folder}_${stem})
  foreach(processes ${ARGN})
    set(name ${folder}.${stem}.${processes})
    add_test(NAME ${name} COMMAND ${MPIEXEC_EXECUTABLE} --allow-run-as-root --oversubscribe --bind-to none
      -n ${processes} $<TARGET_FILE:${target}>)
    set_tests_properties(${name} PROPERTIES TIMEOUT 300 PROCESSORS ${processes} LABELS ${folder})
  endforeach()
endfunction()
