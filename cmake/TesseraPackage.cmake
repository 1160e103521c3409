# Run by CPack before it packs: makes the install tree work next to the torch of any Python.

set(tree ${CPACK_TEMPORARY_DIRECTORY})
set(libraries ${tree}/${CPACK_TESSERA_LIBDIR})
file(GLOB ours ${tree}/bin/* ${libraries}/libtessera_*.so.*.*.*)
list(FILTER ours EXCLUDE REGEX "[.]py$")

# The package includes the distribution's libraries that are used.
include(${CMAKE_CURRENT_LIST_DIR}/TesseraLibraries.cmake)
tessera_distribution_libraries(others ${ours})
file(INSTALL ${others} DESTINATION ${libraries} TYPE SHARED_LIBRARY FOLLOW_SYMLINK_CHAIN)
foreach(library IN LISTS others)
  cmake_path(GET library FILENAME name)
  execute_process(COMMAND dpkg -S */${name} OUTPUT_VARIABLE owner ERROR_QUIET)
  string(REGEX REPLACE ":.*" "" owner "${owner}")
  if(owner AND EXISTS /usr/share/doc/${owner}/copyright)
    file(COPY_FILE /usr/share/doc/${owner}/copyright ${tree}/share/doc/tessera/LICENSE.${owner})
  endif()
endforeach()

# Keeps only the search paths that are within the install tree, including ./torch.
foreach(file IN LISTS ours)
  file(READ_ELF ${file} RUNPATH searched)
  string(REPLACE ":" ";" searched "${searched}")
  list(FILTER searched INCLUDE REGEX "^[$]ORIGIN")
  list(JOIN searched ":" searched)
  file(RPATH_SET FILE ${file} NEW_RPATH "${searched}")
endforeach()
set(config ${libraries}/cmake/tessera/tesseraConfig.cmake)
file(READ ${config} text)
string(REGEX REPLACE "TESSERA_BUILT_WITH_TORCH \"[^\"]*\""
  "TESSERA_BUILT_WITH_TORCH \"\${PACKAGE_PREFIX_DIR}/torch\"" text "${text}")
file(WRITE ${config} "${text}")

file(WRITE ${tree}/torch-version "${CPACK_TESSERA_TORCH}\n")
file(COPY ${CPACK_TESSERA_SOURCE}/packaging/use-torch DESTINATION ${tree})
