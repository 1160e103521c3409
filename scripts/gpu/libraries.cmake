# cmake -D FOLDER=PACK -P scripts/gpu/libraries.cmake: copies the distribution's libraries that the
# pack's programs need to its lib/.
include(${CMAKE_CURRENT_LIST_DIR}/../../cmake/TesseraLibraries.cmake)
file(GLOB ours ${FOLDER}/bin/* ${FOLDER}/lib/*.so.* ${FOLDER}/lib/fake_cuda/*)
tessera_distribution_libraries(others ${ours})
file(INSTALL ${others} DESTINATION ${FOLDER}/lib TYPE SHARED_LIBRARY FOLLOW_SYMLINK_CHAIN)
