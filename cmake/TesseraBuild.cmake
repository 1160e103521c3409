# What every target shares: output folders, language level, warnings, the sanitizer,
# and the functions that declare a layer, a program and a test.
include(GNUInstallDirs)

if(NOT CMAKE_BUILD_TYPE)
  set(CMAKE_BUILD_TYPE Release CACHE STRING "Build type" FORCE)
endif()
set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
# One setting for libraries and programs, so that all of them can share one precompiled header.
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/bin)
set(CMAKE_LIBRARY_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/lib)
set(CMAKE_ARCHIVE_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/lib)
# From a library and from a program to the libraries.
set(CMAKE_INSTALL_RPATH "$ORIGIN;$ORIGIN/../${CMAKE_INSTALL_LIBDIR}")
set(CMAKE_INSTALL_RPATH_USE_LINK_PATH ON)
# A unit that includes libtorch takes about 1 GB: two at a time.
set_property(GLOBAL PROPERTY JOB_POOLS heavy=2)

find_program(CCACHE_PROGRAM ccache)
if(CCACHE_PROGRAM AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  set(CMAKE_CXX_COMPILER_LAUNCHER ${CCACHE_PROGRAM})
endif()

# Sources that include libtorch share the cost of its headers: a clean build takes half the time.
set(TESSERA_UNITY 0 CACHE STRING "Compile this many such sources of a target as one; 0: each alone")

set(TESSERA_SANITIZE "" CACHE STRING "Value of -fsanitize=, for example address,undefined")

add_library(tessera_options INTERFACE)
# Results must not depend on how a compiler fuses a*b+c (see kernels/portable_math.h).
target_compile_options(tessera_options INTERFACE
  -Wall -Wextra -Wpedantic -ffp-contract=off)
# GCC 12 takes "text" + std::string for an overlapping, endless or far copy (its bugs 105651, 105329).
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
  target_compile_options(tessera_options INTERFACE
    $<$<COMPILE_LANGUAGE:CXX>:-Wno-restrict -Wno-stringop-overflow -Wno-array-bounds>)
endif()
if(TESSERA_SANITIZE)
  target_compile_options(tessera_options INTERFACE
    -fsanitize=${TESSERA_SANITIZE} -fno-omit-frame-pointer -fno-sanitize-recover=all)
  target_link_options(tessera_options INTERFACE -fsanitize=${TESSERA_SANITIZE})
endif()

# tessera_layer(<name> SOURCES <file>... [ALONE <file>...] [USES <target>...] [PRIVATE <target>...]
#               [NO_TORCH])
# A layer: the shared library libtessera_<name>.so, known as tessera::<name>. ALONE: sources that a
# unity build must not join with others, because they have file-local names in common.
function(tessera_layer name)
  cmake_parse_arguments(ARG "NO_TORCH" "" "SOURCES;ALONE;USES;PRIVATE" ${ARGN})
  add_library(tessera_${name} SHARED ${ARG_SOURCES} ${ARG_ALONE})
  add_library(tessera::${name} ALIAS tessera_${name})
  set_property(GLOBAL APPEND PROPERTY TESSERA_LAYERS tessera::${name})
  set_target_properties(tessera_${name} PROPERTIES EXPORT_NAME ${name})
  target_include_directories(tessera_${name} PUBLIC
    $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include>
    $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>)
  target_compile_features(tessera_${name} PUBLIC cxx_std_20)
  target_link_libraries(tessera_${name} PUBLIC ${ARG_USES}
    PRIVATE ${ARG_PRIVATE} $<BUILD_INTERFACE:tessera_options>)
  if(NOT ARG_NO_TORCH)
    target_link_libraries(tessera_${name} PUBLIC tessera::libtorch)
    tessera_use_unity(tessera_${name} "${ARG_ALONE}")
    tessera_use_pch(tessera_${name})
  endif()
  install(TARGETS tessera_${name} EXPORT tesseraTargets)
endfunction()

# tessera::tessera: all layers together, for a program that does not choose among them.
function(tessera_all_layers)
  get_property(layers GLOBAL PROPERTY TESSERA_LAYERS)
  add_library(tessera_all INTERFACE)
  add_library(tessera::tessera ALIAS tessera_all)
  set_target_properties(tessera_all PROPERTIES EXPORT_NAME tessera)
  target_link_libraries(tessera_all INTERFACE ${layers})
  install(TARGETS tessera_all EXPORT tesseraTargets)
endfunction()

# tessera_program(<name> SOURCES <file>... [USES <target>...] [NO_TORCH] [NO_INSTALL])
function(tessera_program name)
  cmake_parse_arguments(ARG "NO_TORCH;NO_INSTALL" "" "SOURCES;USES" ${ARGN})
  add_executable(${name} ${ARG_SOURCES})
  target_link_libraries(${name} PRIVATE ${ARG_USES} tessera_options)
  if(NOT ARG_NO_TORCH)
    tessera_use_pch(${name})
  endif()
  if(NOT ARG_NO_INSTALL)
    install(TARGETS ${name})
  endif()
endfunction()

# All tests, without the programs that no test uses.
add_custom_target(tessera_tests)

# tessera_test(<name> SOURCES <file>... [ALONE <file>...] USES <target>... [NO_TORCH] [SERIAL])
# A GoogleTest program and one CTest test: a process for each of its tests would spend nine tenths
# of the time on loading libtorch. ALONE: as in tessera_layer. SERIAL: it takes every core.
function(tessera_test name)
  cmake_parse_arguments(ARG "NO_TORCH;SERIAL" "" "SOURCES;ALONE;USES" ${ARGN})
  add_executable(${name} ${ARG_SOURCES} ${ARG_ALONE})
  add_dependencies(tessera_tests ${name})
  target_link_libraries(${name} PRIVATE ${ARG_USES} GTest::gtest_main tessera_options)
  target_include_directories(${name} PRIVATE ${PROJECT_SOURCE_DIR}/tests)
  if(NOT ARG_NO_TORCH)
    tessera_use_unity(${name} "${ARG_ALONE}")
    tessera_use_pch(${name})
  endif()
  add_test(NAME ${name} COMMAND ${name})
  set_tests_properties(${name} PROPERTIES TIMEOUT 900 ENVIRONMENT "OMP_NUM_THREADS=1")
  if(ARG_SERIAL)
    set_tests_properties(${name} PROPERTIES RUN_SERIAL TRUE)
  endif()
endfunction()

function(tessera_use_unity target alone)
  if(TESSERA_UNITY)
    set_target_properties(${target} PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE ${TESSERA_UNITY})
    set_source_files_properties(${alone} PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
  endif()
endfunction()

# One precompiled header, made once and reused by every target that includes libtorch.
function(tessera_use_pch target)
  if(NOT TESSERA_PCH)
    return()
  endif()
  if(NOT TARGET tessera_pch)
    file(WRITE ${CMAKE_BINARY_DIR}/pch/pch.cpp "// Owner of the precompiled header.\n")
    add_library(tessera_pch OBJECT ${CMAKE_BINARY_DIR}/pch/pch.cpp)
    target_link_libraries(tessera_pch PRIVATE tessera::libtorch tessera_options)
    # CPU-seconds with g++ 12: ATen/ATen.h 6, torch/nn/module.h 10, custom_function.h 8.
    target_precompile_headers(tessera_pch PRIVATE
      <ATen/ATen.h> <torch/csrc/autograd/custom_function.h> <torch/nn/module.h>
      <torch/library.h> <algorithm> <memory> <string> <vector>)
    if(CMAKE_CXX_COMPILER_ID STREQUAL "Clang")
      target_compile_options(tessera_pch PRIVATE -fpch-instantiate-templates)
    endif()
  endif()
  target_precompile_headers(${target} REUSE_FROM tessera_pch)
  # CMake compiles programs with -fPIE, for which a precompiled header made with -fPIC is refused.
  target_compile_options(${target} PRIVATE -fPIC)
  set_property(TARGET ${target} PROPERTY JOB_POOL_COMPILE heavy)
endfunction()
