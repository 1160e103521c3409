# Precompiled headers that several targets share. Used by this build, by projects that add this one,
# and, once installed, by tesseraConfig.cmake.

# tessera_make_pch(<owner> HEADERS <header>... USES <target>...)
# Makes a target that owns the precompiled headers; does nothing if the target exists.
function(tessera_make_pch owner)
  if(TARGET ${owner})
    return()
  endif()
  cmake_parse_arguments(ARG "" "" "HEADERS;USES" ${ARGN})
  set(source ${CMAKE_BINARY_DIR}/pch/${owner}.cpp)
  file(CONFIGURE OUTPUT ${source} CONTENT "// Owner of a precompiled header.\n")
  add_library(${owner} OBJECT ${source})
  target_link_libraries(${owner} PRIVATE ${ARG_USES})
  target_precompile_headers(${owner} PRIVATE ${ARG_HEADERS})
  target_compile_options(${owner} PRIVATE -fPIC)
  if(CMAKE_CXX_COMPILER_ID STREQUAL "Clang")
    target_compile_options(${owner} PRIVATE -fpch-instantiate-templates
      "SHELL:-Xclang -fno-pch-timestamp")
  endif()
endfunction()

function(tessera_reuse_pch target owner)
  target_precompile_headers(${target} REUSE_FROM ${owner})
  # CMake compiles programs with -fPIE, and such a compilation rejects a precompiled header made
  # with -fPIC.
  target_compile_options(${target} PRIVATE -fPIC)
endfunction()

# tessera_use_pch(<target>...): for programs that use Tessera.
# Gives the targets tessera.hpp as a precompiled header, which is compiled once for all of them, so
# they must have the same compile options and definitions. The header is then included
# automatically.
function(tessera_use_pch)
  tessera_make_pch(tessera_program_pch HEADERS <tessera/tessera.hpp> USES tessera::tessera)
  foreach(target IN LISTS ARGN)
    tessera_reuse_pch(${target} tessera_program_pch)
  endforeach()
endfunction()
