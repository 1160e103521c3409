# Run by cmake --install for the components "tarball" and "wheel", after the install tree itself: makes
# the install tree work next to the torch of any Python, and without the distribution's libraries.

set(tree ${CMAKE_INSTALL_PREFIX})
set(libraries ${tree}/${TESSERA_LIBDIR})
file(GLOB ours ${tree}/bin/* ${libraries}/libtessera_*.so.*)
list(FILTER ours EXCLUDE REGEX "([.]py|/bench_mfu)$")  # programs in Python

# The package includes the distribution's libraries that are used, and nlohmann-json's headers
# (TesseraInstall.cmake), with their licences.
include(${CMAKE_CURRENT_LIST_DIR}/TesseraLibraries.cmake)
tessera_distribution_libraries(others ${ours})
set(copied nlohmann/json.hpp)
foreach(library IN LISTS others)
  cmake_path(GET library FILENAME name)
  file(COPY_FILE ${library} ${libraries}/${name})
  list(APPEND copied ${name})
endforeach()
foreach(name IN LISTS copied)
  execute_process(COMMAND dpkg -S */${name} OUTPUT_VARIABLE owner ERROR_QUIET)
  string(REGEX REPLACE ":.*" "" owner "${owner}")
  if(owner AND EXISTS /usr/share/doc/${owner}/copyright)
    file(COPY_FILE /usr/share/doc/${owner}/copyright ${tree}/share/doc/tessera/LICENSE.${owner})
  endif()
endforeach()

# Keeps only the search paths that are relative to the file.
foreach(file IN LISTS ours)
  file(READ_ELF ${file} RPATH rpath RUNPATH runpath)  # a file has only one of the two
  string(REPLACE ":" ";" searched "${rpath}${runpath}")
  list(FILTER searched INCLUDE REGEX "^[$]ORIGIN")
  list(JOIN searched ":" searched)
  file(RPATH_SET FILE ${file} NEW_RPATH "${searched}")
endforeach()
set(config ${libraries}/cmake/tessera/tesseraConfig.cmake)
file(READ ${config} text)
string(REGEX REPLACE "TESSERA_BUILT_WITH_TORCH \"[^\"]*\""
  "TESSERA_BUILT_WITH_TORCH \"\${PACKAGE_PREFIX_DIR}/torch\" \"\${PACKAGE_PREFIX_DIR}/../torch\"" text "${text}")
file(WRITE ${config} "${text}")
file(WRITE ${tree}/torch-version "${TESSERA_TORCH_VERSION}\n")

# A wheel cannot contain links. The links are only used by linkers that are given -ltessera_core.
if(CMAKE_INSTALL_COMPONENT STREQUAL "wheel")
  file(GLOB links ${libraries}/libtessera_*.so)
  file(REMOVE ${links})
endif()
