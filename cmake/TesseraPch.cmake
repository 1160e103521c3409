# Precompiled headers that several targets share. Used by our own build and, installed, by
# tesseraConfig.cmake.

# tessera_make_pch(<owner> HEADERS <header>... USES <target>...)
# A target that owns the precompiled headers; does nothing the second time.
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
  # CMake compiles programs with -fPIE, for which a precompiled header made with -fPIC is refused.
  target_compile_options(${target} PRIVATE -fPIC)
endfunction()
