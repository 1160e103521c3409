# Finds libtorch and defines
#   tessera::libtorch       headers, torch_cpu and c10: what every layer needs
#   tessera::libtorch_cuda  torch_cuda and c10_cuda; only where a CUDA toolkit is found
# Used by this build and, once installed, by tesseraConfig.cmake.
#
# CPU programs link only torch_cpu: they start faster and use less memory without the CUDA
# libraries. Code that needs CUDA is in libtessera_cuda.so, which is loaded on demand.

# One release of each minor version, the oldest first. scripts/setup reads this line.
set(TESSERA_TESTED_TORCH 2.11.0 2.12.1 2.13.0 2.14.1 2.15.0)
option(TESSERA_ANY_TORCH "Try a version of libtorch that Tessera is not tested with" OFF)

# The default libtorch is the wheel in the virtual environment of scripts/setup or, in an installed
# Tessera, the one that it was built with (TESSERA_BUILT_WITH_TORCH, with the version
# TESSERA_BUILT_WITH_TORCH_VERSION, which no other may replace). The caller's Torch_DIR,
# Torch_ROOT and CMAKE_PREFIX_PATH take precedence.
file(GLOB _tessera_wheel "${TESSERA_VENV}/lib/python3*/site-packages/torch")
if(TESSERA_TORCH_ROOT AND _tessera_wheel AND TESSERA_TORCH_ROOT MATCHES "/[.]deps/venv[^/]*/lib/" AND
   NOT TESSERA_TORCH_ROOT STREQUAL _tessera_wheel)
  message(FATAL_ERROR "This build folder was configured with the libtorch in ${TESSERA_TORCH_ROOT}, "
    "and scripts/setup has chosen ${_tessera_wheel} since: configure it anew with cmake --fresh.")
endif()
find_path(TESSERA_TORCH_ROOT include/torch/csrc/api/include/torch/torch.h
  HINTS ${Torch_DIR}/../../.. ${Torch_ROOT} ${_tessera_wheel} ${TESSERA_BUILT_WITH_TORCH}
  PATH_SUFFIXES libtorch torch
  DOC "The folder of libtorch that holds include/ and lib/")
if(NOT TESSERA_TORCH_ROOT)
  message(FATAL_ERROR "libtorch was not found. Run scripts/setup, or pass "
    "-DCMAKE_PREFIX_PATH=DIR where DIR holds libtorch's include/ and lib/.")
endif()

file(STRINGS ${TESSERA_TORCH_ROOT}/include/torch/headeronly/version.h _version_lines
  REGEX "define TORCH_VERSION_(MAJOR|MINOR) ")
string(REGEX REPLACE ".*MAJOR ([0-9]+).*MINOR ([0-9]+).*" "\\1.\\2" TESSERA_TORCH_VERSION "${_version_lines}")
string(REGEX REPLACE "([0-9]+[.][0-9]+)[.][0-9]+" "\\1" _tested_minors "${TESSERA_TESTED_TORCH}")
set(_refused "")
if(TESSERA_BUILT_WITH_TORCH_VERSION)
  if(NOT TESSERA_TORCH_VERSION STREQUAL TESSERA_BUILT_WITH_TORCH_VERSION)
    set(_refused "is not the version that this Tessera was built with, ${TESSERA_BUILT_WITH_TORCH_VERSION}: pass "
      "-DTorch_ROOT=DIR, where DIR has libtorch ${TESSERA_BUILT_WITH_TORCH_VERSION}, or build Tessera with "
      "libtorch ${TESSERA_TORCH_VERSION}.")
  endif()
elseif(NOT TESSERA_TORCH_VERSION IN_LIST _tested_minors AND NOT TESSERA_ANY_TORCH)
  list(JOIN _tested_minors ", " _tested_minors)
  set(_refused "is not tested, ${_tested_minors} are: "
    "run scripts/setup, pass another CMAKE_PREFIX_PATH, or try it with -DTESSERA_ANY_TORCH=ON.")
endif()
if(_refused)
  set(_refused "libtorch ${TESSERA_TORCH_VERSION} in ${TESSERA_TORCH_ROOT} " ${_refused})
  unset(TESSERA_TORCH_ROOT CACHE)  # so that the next configuration searches again
  message(FATAL_ERROR ${_refused})
endif()

# find_package(Torch) is not used. It fails for a CUDA build of libtorch on a machine without a CUDA
# toolkit, and changes the compiler's options for CUDA in every target.
find_package(CUDAToolkit QUIET)
set(TESSERA_TORCH_HAS_CUDA OFF)
if(EXISTS ${TESSERA_TORCH_ROOT}/lib/libtorch_cuda.so AND CUDAToolkit_FOUND AND CUDAToolkit_NVCC_EXECUTABLE)
  set(TESSERA_TORCH_HAS_CUDA ON)
endif()

if(NOT TARGET tessera::libtorch)
  add_library(tessera::libtorch INTERFACE IMPORTED GLOBAL)
  target_include_directories(tessera::libtorch SYSTEM INTERFACE
    ${TESSERA_TORCH_ROOT}/include ${TESSERA_TORCH_ROOT}/include/torch/csrc/api/include)
  target_link_libraries(tessera::libtorch INTERFACE
    ${TESSERA_TORCH_ROOT}/lib/libtorch_cpu.so ${TESSERA_TORCH_ROOT}/lib/libc10.so)
  target_link_options(tessera::libtorch INTERFACE
    "-Wl,-rpath,${TESSERA_TORCH_ROOT}/lib" "-Wl,--allow-shlib-undefined")
  # g++ by default collects garbage whenever its memory has doubled, but libtorch's headers leave no
  # garbage. Starting at 1 GB saves a tenth of the compile time.
  target_compile_options(tessera::libtorch INTERFACE
    $<$<COMPILE_LANG_AND_ID:CXX,GNU>:--param=ggc-min-heapsize=1048576>)
endif()

if(TESSERA_TORCH_HAS_CUDA AND NOT TARGET tessera::libtorch_cuda)
  add_library(tessera::libtorch_cuda INTERFACE IMPORTED GLOBAL)
  target_link_libraries(tessera::libtorch_cuda INTERFACE tessera::libtorch
    "-Wl,--no-as-needed" ${TESSERA_TORCH_ROOT}/lib/libtorch_cuda.so
    ${TESSERA_TORCH_ROOT}/lib/libc10_cuda.so "-Wl,--as-needed" CUDA::cudart)
endif()
