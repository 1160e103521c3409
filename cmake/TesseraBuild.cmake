# Settings that all targets share (output folders, language level, warnings, the sanitizer), and
# functions that declare a layer, a program and a test.
include(GNUInstallDirs)
include(TesseraPch)

if(PROJECT_IS_TOP_LEVEL AND NOT CMAKE_BUILD_TYPE)
  set(CMAKE_BUILD_TYPE Release CACHE STRING "Build type" FORCE)
endif()
set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
# tessera/export.h explains which symbols a library exports.
set(CMAKE_CXX_VISIBILITY_PRESET hidden)
set(CMAKE_CUDA_VISIBILITY_PRESET hidden)
set(CMAKE_VISIBILITY_INLINES_HIDDEN ON)
# One setting for libraries and programs, so that all of them can share one precompiled header.
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_RUNTIME_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/bin)
set(CMAKE_LIBRARY_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/lib)
set(CMAKE_ARCHIVE_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/lib)
# Search paths from a library or a program to the libraries.
set(CMAKE_INSTALL_RPATH "$ORIGIN;$ORIGIN/../${CMAKE_INSTALL_LIBDIR}")
set(CMAKE_INSTALL_RPATH_USE_LINK_PATH ON)
# Compiling a source that includes libtorch takes about 1 GB, so two are compiled at a time.
set_property(GLOBAL APPEND PROPERTY JOB_POOLS tessera_heavy=2)

find_program(TESSERA_CCACHE ccache)
if(TESSERA_CCACHE AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  # Without this sloppiness ccache rejects every source that uses a precompiled header. The
  # alternative, preprocessing each source and reading g++'s 600 MB precompiled header for it, takes
  # 3 s for each source.
  set(CMAKE_CXX_COMPILER_LAUNCHER ${CMAKE_COMMAND} -E env CCACHE_DEPEND=1 CCACHE_INODECACHE=1
    CCACHE_SLOPPINESS=pch_defines,time_macros,include_file_mtime,include_file_ctime ${TESSERA_CCACHE})
endif()

# Joined sources of a target share the cost of their headers, so a clean build takes half the time.
set(TESSERA_UNITY 0 CACHE STRING "Compile this many such sources of a target as one; 0: each alone")
set(TESSERA_TEST_UNITY "" CACHE STRING "The same for tests; empty: as the layers")

# Half of a build's time goes into the tests, whose own speed matters less.
set(TESSERA_TEST_OPTIMIZE "" CACHE STRING "How tests are optimised, for example -O0; empty: as the layers")

set(TESSERA_SANITIZE "" CACHE STRING "Value of -fsanitize=, for example address,undefined")

add_library(tessera_options INTERFACE)
# Results must not depend on whether a compiler fuses a*b+c (see kernels/detail/portable_math.h).
target_compile_options(tessera_options INTERFACE
  -Wall -Wextra -Wpedantic -ffp-contract=off)
# GCC 12 falsely warns that "text" + std::string is an overlapping, endless or out-of-bounds copy
# (its bugs 105651, 105329).
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
  target_compile_options(tessera_options INTERFACE
    $<$<COMPILE_LANGUAGE:CXX>:-Wno-restrict -Wno-stringop-overflow -Wno-array-bounds>)
endif()
if(TESSERA_SANITIZE)
  target_compile_options(tessera_options INTERFACE
    -fsanitize=${TESSERA_SANITIZE} -fno-omit-frame-pointer -fno-sanitize-recover=all)
  target_link_options(tessera_options INTERFACE -fsanitize=${TESSERA_SANITIZE})
endif()

# tessera_find_sources(<variable> [<file or folder/>...]): sets the variable to the .cpp files below
# this folder, except the given ones.
function(tessera_find_sources variable)
  file(GLOB_RECURSE found RELATIVE ${CMAKE_CURRENT_SOURCE_DIR} CONFIGURE_DEPENDS *.cpp)
  list(REMOVE_ITEM found ${ARGN} "")
  foreach(folder IN LISTS ARGN)
    if(folder MATCHES "/$")
      list(FILTER found EXCLUDE REGEX "^${folder}")
    endif()
  endforeach()
  set(${variable} ${found} PARENT_SCOPE)
endfunction()

# tessera_find_external(<folder>/<header>): finds a library of headers, and links its folder into
# TESSERA_EXTERNAL_DIR, which is on the search path of all layers. The folder in which a library was
# found may also have fmt (.deps/root), which must not be found before libtorch's fmt.
set(TESSERA_EXTERNAL_DIR ${PROJECT_BINARY_DIR}/external)
file(MAKE_DIRECTORY ${TESSERA_EXTERNAL_DIR})
function(tessera_find_external header)
  cmake_path(GET header PARENT_PATH folder)
  string(MAKE_C_IDENTIFIER TESSERA_INCLUDE_OF_${folder} found)
  find_path(${found} ${header} REQUIRED)
  file(CREATE_LINK ${${found}}/${folder} ${TESSERA_EXTERNAL_DIR}/${folder} SYMBOLIC)
endfunction()

# A target for all libraries and programs that are installed.
add_custom_target(tessera_package)

# tessera_layer(<name> [SOURCES <file>...] [EXCEPT <file>...] [ALONE <file>...] [USES <target>...]
#               [PRIVATE <target>...] [NO_TORCH])
# A layer: the shared library libtessera_<name>.so with the alias tessera::<name>. Its sources are
# SOURCES; by default all .cpp files below its folder except EXCEPT (files and folders/). ALONE:
# sources that a unity build must not join with others, because they share file-local names.
function(tessera_layer name)
  cmake_parse_arguments(ARG "NO_TORCH" "" "SOURCES;EXCEPT;ALONE;USES;PRIVATE" ${ARGN})
  if(NOT ARG_SOURCES)
    tessera_find_sources(ARG_SOURCES ${ARG_EXCEPT})
  endif()
  list(REMOVE_ITEM ARG_SOURCES ${ARG_ALONE} "")
  add_library(tessera_${name} SHARED ${ARG_SOURCES} ${ARG_ALONE})
  add_library(tessera::${name} ALIAS tessera_${name})
  set_property(GLOBAL APPEND PROPERTY TESSERA_LAYERS tessera::${name})
  set_target_properties(tessera_${name} PROPERTIES EXPORT_NAME ${name})
  tessera_use_version(tessera_${name})
  target_include_directories(tessera_${name} PUBLIC
    $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include>
    $<BUILD_INTERFACE:${TESSERA_RENAMED_DIR}>
    $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>
    PRIVATE ${CMAKE_CURRENT_SOURCE_DIR})
  target_compile_features(tessera_${name} PUBLIC cxx_std_20)
  target_link_libraries(tessera_${name} PUBLIC ${ARG_USES}
    PRIVATE ${ARG_PRIVATE} $<BUILD_INTERFACE:tessera_options>)
  # Otherwise a layer would call a program's copies of inline functions, which are not optimised in
  # tests.
  target_link_options(tessera_${name} PRIVATE -Wl,-Bsymbolic-functions)
  tessera_use_unity(tessera_${name} "${ARG_ALONE}")
  if(NOT ARG_NO_TORCH)
    target_link_libraries(tessera_${name} PUBLIC tessera::libtorch)
    tessera_use_libtorch_pch(tessera_${name})
  endif()
  if(TESSERA_INSTALL)
    install(TARGETS tessera_${name} EXPORT tesseraTargets)
    add_dependencies(tessera_package tessera_${name})
  endif()
endfunction()

# tessera_is_cold(<target>): for programs, most of whose code reads options. With -O3 CLI11's
# templates take a third more of the compiler's time and no run is faster. A layer would not compile
# faster: g++ takes the level of most functions from the precompiled header.
function(tessera_is_cold target)
  target_compile_options(${target} PRIVATE $<$<CONFIG:Release>:-O1>)
endfunction()

# Names libraries by version (libtessera_x.so.0.3), so that a program never loads a library of
# another minor version.
function(tessera_use_version target)
  set_target_properties(${target} PROPERTIES
    SOVERSION ${PROJECT_VERSION_MAJOR}.${PROJECT_VERSION_MINOR})
endfunction()

# tessera::tessera: all layers together, for programs that do not choose among them.
function(tessera_all_layers)
  get_property(layers GLOBAL PROPERTY TESSERA_LAYERS)
  add_library(tessera_all INTERFACE)
  add_library(tessera::tessera ALIAS tessera_all)
  set_target_properties(tessera_all PROPERTIES EXPORT_NAME tessera)
  target_link_libraries(tessera_all INTERFACE ${layers})
  if(TESSERA_INSTALL)
    install(TARGETS tessera_all EXPORT tesseraTargets)
  endif()
endfunction()

# tessera_program(<name> SOURCES <file>... [USES <target>...] [NO_TORCH] [NO_INSTALL]
#                 [OPTIMIZE <flag>])
# OPTIMIZE: an optimisation flag that replaces the build type's, like TESSERA_TEST_OPTIMIZE.
function(tessera_program name)
  cmake_parse_arguments(ARG "NO_TORCH;NO_INSTALL" "OPTIMIZE" "SOURCES;USES" ${ARGN})
  add_executable(${name} ${ARG_SOURCES})
  target_link_libraries(${name} PRIVATE ${ARG_USES} tessera_options)
  tessera_use_unity(${name} "")
  if(NOT ARG_NO_TORCH)
    tessera_use_libtorch_pch(${name} ${ARG_OPTIMIZE})
    # The library is opened at run time and not linked, so it needs an explicit dependency.
    if(TARGET tessera_cuda)
      add_dependencies(${name} tessera_cuda)
    endif()
  endif()
  target_compile_options(${name} PRIVATE ${ARG_OPTIMIZE})
  if(TESSERA_INSTALL AND NOT ARG_NO_INSTALL)
    install(TARGETS ${name})
    add_dependencies(tessera_package ${name})
  endif()
endfunction()

# A target for all tests and the programs that they use.
add_custom_target(tessera_tests)

# tessera_test(<name> [SOURCES <file>...] [EXCEPT <file>...] [ALONE <file>...] USES <target>...
#              [NO_TORCH] [WAITING <filter>...])
# A GoogleTest program that is one CTest test: a process for each GoogleTest test would spend nine
# tenths of its time on loading libtorch. SOURCES, EXCEPT, ALONE: see tessera_layer. WAITING: the
# tests matched by each of these filters mostly wait for time-outs, so they form a separate CTest
# test that runs in parallel with the others.
function(tessera_test name)
  cmake_parse_arguments(ARG "NO_TORCH" "" "SOURCES;EXCEPT;ALONE;USES;WAITING" ${ARGN})
  if(NOT ARG_SOURCES)
    tessera_find_sources(ARG_SOURCES ${ARG_EXCEPT} ${ARG_ALONE})
  endif()
  add_executable(${name} ${ARG_SOURCES} ${ARG_ALONE})
  add_dependencies(tessera_tests ${name})
  target_link_libraries(${name} PRIVATE ${ARG_USES} GTest::gtest_main tessera_options)
  target_include_directories(${name} PRIVATE ${PROJECT_SOURCE_DIR}/tests)
  tessera_use_unity(${name} "${ARG_ALONE}" ${TESSERA_TEST_UNITY})
  if(NOT ARG_NO_TORCH)
    tessera_use_libtorch_pch(${name} ${TESSERA_TEST_OPTIMIZE})
  endif()
  target_compile_options(${name} PRIVATE ${TESSERA_TEST_OPTIMIZE})
  list(JOIN ARG_WAITING ":" waiting)
  tessera_run_test(${name} ${name} 2 "*-${waiting}")
  foreach(filter IN LISTS ARG_WAITING)
    string(MAKE_C_IDENTIFIER ${name}_${filter} part)
    tessera_run_test(${part} ${name} 1 ${filter})
    set_tests_properties(${part} PROPERTIES COST 1000)  # run first, because they take long
  endforeach()
endfunction()

# tessera_run_test(<CTest's name> <program> <half cores> <filter>): scripts/test lets CTest run two
# half-core jobs on each core, and two more for tests that wait.
function(tessera_run_test test program half_cores filter)
  add_test(NAME ${test} COMMAND ${program} --gtest_filter=${filter})
  set_tests_properties(${test} PROPERTIES TIMEOUT 900 PROCESSORS ${half_cores}
    ENVIRONMENT "OMP_NUM_THREADS=1")
endfunction()

# tessera_use_unity(<target> <files not to be joined> [<number of sources to join, instead of
# TESSERA_UNITY>])
function(tessera_use_unity target alone)
  list(APPEND ARGN ${TESSERA_UNITY})
  list(GET ARGN 0 sources)
  if(sources)
    set_target_properties(${target} PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE ${sources})
    set_source_files_properties(${alone} PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
  endif()
endfunction()

# tessera_use_libtorch_pch(<target> [-O0]): one precompiled header, made once and used by every
# target that includes libtorch. Compilers reject a precompiled header with another optimisation
# level than the target's.
function(tessera_use_libtorch_pch target)
  if(NOT TESSERA_PCH)
    return()
  endif()
  set(owner tessera_pch)
  if("-O0" IN_LIST ARGN)
    set(owner tessera_pch_unoptimised)
  endif()
  tessera_make_pch(${owner} USES tessera::libtorch tessera_options HEADERS
    <ATen/ATen.h> <torch/library.h> <torch/nn/module.h> <algorithm> <memory> <string> <vector>)
  if("-O0" IN_LIST ARGN)
    target_compile_options(${owner} PRIVATE -O0)
  endif()
  tessera_reuse_pch(${target} ${owner})
  set_property(TARGET ${target} PROPERTY JOB_POOL_COMPILE tessera_heavy)
endfunction()
