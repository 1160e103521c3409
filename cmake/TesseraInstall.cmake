# Installs headers, libraries, programs and the package that find_package(tessera) reads; also packs
# the install tree as a tarball (cpack, docs/install.md).
include(CMakePackageConfigHelpers)

set(TESSERA_PACKAGE_DIR ${CMAKE_INSTALL_LIBDIR}/cmake/tessera)

configure_package_config_file(cmake/tesseraConfig.cmake.in
  ${PROJECT_BINARY_DIR}/package/tesseraConfig.cmake
  INSTALL_DESTINATION ${TESSERA_PACKAGE_DIR})
# Until version 1.0 a minor version may change the interface.
write_basic_package_version_file(${PROJECT_BINARY_DIR}/package/tesseraConfigVersion.cmake
  COMPATIBILITY SameMinorVersion)

install(DIRECTORY include/tessera DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(FILES LICENSE README.md DESTINATION ${CMAKE_INSTALL_DOCDIR})
install(EXPORT tesseraTargets NAMESPACE tessera:: DESTINATION ${TESSERA_PACKAGE_DIR})
install(FILES cmake/TesseraPch.cmake cmake/TesseraTorch.cmake
  ${PROJECT_BINARY_DIR}/package/tesseraConfig.cmake
  ${PROJECT_BINARY_DIR}/package/tesseraConfigVersion.cmake
  DESTINATION ${TESSERA_PACKAGE_DIR})
if(TESSERA_EXAMPLES)
  install(DIRECTORY examples/llama/configs DESTINATION ${CMAKE_INSTALL_DATADIR}/tessera)
endif()

if(PROJECT_IS_TOP_LEVEL)
  set(CPACK_GENERATOR TGZ)
  set(CPACK_PACKAGE_FILE_NAME
    tessera-${PROJECT_VERSION}-torch${TESSERA_TORCH_VERSION}-linux-${CMAKE_SYSTEM_PROCESSOR})
  set(CPACK_STRIP_FILES ON)
  set(CPACK_VERBATIM_VARIABLES ON)
  set(CPACK_PRE_BUILD_SCRIPTS ${PROJECT_SOURCE_DIR}/cmake/TesseraPackage.cmake)
  set(CPACK_TESSERA_SOURCE ${PROJECT_SOURCE_DIR})
  set(CPACK_TESSERA_LIBDIR ${CMAKE_INSTALL_LIBDIR})
  set(CPACK_TESSERA_TORCH ${TESSERA_TORCH_VERSION})
  include(CPack)
endif()
