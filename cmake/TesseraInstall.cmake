# The install tree: headers, libraries, programs and the package that find_package(tessera) reads.
include(CMakePackageConfigHelpers)

set(TESSERA_PACKAGE_DIR ${CMAKE_INSTALL_LIBDIR}/cmake/tessera)

configure_package_config_file(cmake/tesseraConfig.cmake.in
  ${CMAKE_BINARY_DIR}/package/tesseraConfig.cmake
  INSTALL_DESTINATION ${TESSERA_PACKAGE_DIR})
# Until 1.0 a minor version may change the interface.
write_basic_package_version_file(${CMAKE_BINARY_DIR}/package/tesseraConfigVersion.cmake
  COMPATIBILITY SameMinorVersion)

install(DIRECTORY include/tessera DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(FILES LICENSE README.md DESTINATION ${CMAKE_INSTALL_DOCDIR})
install(EXPORT tesseraTargets NAMESPACE tessera:: DESTINATION ${TESSERA_PACKAGE_DIR})
install(FILES cmake/TesseraPch.cmake cmake/TesseraTorch.cmake
  ${CMAKE_BINARY_DIR}/package/tesseraConfig.cmake
  ${CMAKE_BINARY_DIR}/package/tesseraConfigVersion.cmake
  DESTINATION ${TESSERA_PACKAGE_DIR})
