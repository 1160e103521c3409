# Installs headers, libraries, programs and the package that find_package(tessera) reads. The
# components "tarball" (for cpack) and "wheel" (for pip) make this install tree work next to the
# torch of any Python (docs/install.md).
include(CMakePackageConfigHelpers)

set(TESSERA_PACKAGE_DIR ${CMAKE_INSTALL_LIBDIR}/cmake/tessera)

get_property(TESSERA_COMPONENTS GLOBAL PROPERTY TESSERA_LAYERS)
list(TRANSFORM TESSERA_COMPONENTS REPLACE "tessera::" "")
list(JOIN TESSERA_COMPONENTS ", " TESSERA_COMPONENTS)
configure_package_config_file(cmake/tesseraConfig.cmake.in
  ${PROJECT_BINARY_DIR}/package/tesseraConfig.cmake
  INSTALL_DESTINATION ${TESSERA_PACKAGE_DIR})
# Until version 1.0 a minor version may change the interface.
write_basic_package_version_file(${PROJECT_BINARY_DIR}/package/tesseraConfigVersion.cmake
  COMPATIBILITY SameMinorVersion)

install(DIRECTORY include/tessera ${TESSERA_RENAMED_DIR}/tessera DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
file(REAL_PATH ${TESSERA_EXTERNAL_DIR}/nlohmann nlohmann)  # otherwise the link is installed
install(DIRECTORY ${nlohmann}/ DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/tessera/external/nlohmann)
install(FILES LICENSE README.md DESTINATION ${CMAKE_INSTALL_DOCDIR})
install(EXPORT tesseraTargets NAMESPACE tessera:: DESTINATION ${TESSERA_PACKAGE_DIR})
install(FILES cmake/TesseraPch.cmake cmake/TesseraTorch.cmake
  ${PROJECT_BINARY_DIR}/package/tesseraConfig.cmake
  ${PROJECT_BINARY_DIR}/package/tesseraConfigVersion.cmake
  DESTINATION ${TESSERA_PACKAGE_DIR})
if(TESSERA_EXAMPLES)
  install(DIRECTORY examples/llama/configs DESTINATION ${CMAKE_INSTALL_DATADIR}/tessera)
endif()

foreach(component tarball wheel)
  install(CODE "set(TESSERA_LIBDIR ${CMAKE_INSTALL_LIBDIR})\nset(TESSERA_TORCH_VERSION ${TESSERA_TORCH_VERSION})"
    SCRIPT cmake/TesseraPackage.cmake COMPONENT ${component} EXCLUDE_FROM_ALL)
endforeach()
install(PROGRAMS packaging/use-torch DESTINATION . COMPONENT tarball EXCLUDE_FROM_ALL)

if(PROJECT_IS_TOP_LEVEL)
  set(CPACK_GENERATOR TGZ)
  set(CPACK_PACKAGE_FILE_NAME
    tessera-${PROJECT_VERSION}-torch${TESSERA_TORCH_VERSION}-linux-${CMAKE_SYSTEM_PROCESSOR})
  set(CPACK_STRIP_FILES ON)
  set(CPACK_VERBATIM_VARIABLES ON)
  set(CPACK_INSTALL_CMAKE_PROJECTS
    ${PROJECT_BINARY_DIR} tessera Unspecified /
    ${PROJECT_BINARY_DIR} tessera tarball /)
  include(CPack)
endif()
