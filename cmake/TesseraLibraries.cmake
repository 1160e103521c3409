# tessera_distribution_libraries(RESULT FILE...): paths of the libraries that the given programs and
# libraries load and that a machine with torch may lack: all except glibc, libstdc++, Tessera's own
# and those shipped with torch.
function(tessera_distribution_libraries result)
  file(GET_RUNTIME_DEPENDENCIES LIBRARIES ${ARGN}
    RESOLVED_DEPENDENCIES_VAR others UNRESOLVED_DEPENDENCIES_VAR missing
    PRE_EXCLUDE_REGEXES "^lib(tessera_|torch|c10|gomp|cu|nccl|nv)" "^ld-linux"
      "^lib(c|m|dl|rt|pthread|util|stdc[+][+]|gcc_s)[.]so")
  if(missing)
    message(FATAL_ERROR "the package would lack ${missing}: install them where it is built")
  endif()
  set(${result} ${others} PARENT_SCOPE)
endfunction()

# cmake -D FOLDER=PACK -P cmake/TesseraLibraries.cmake: copies the libraries that the programs of a
# pack (scripts/gpu/pack) need to its lib/.
if(CMAKE_SCRIPT_MODE_FILE STREQUAL CMAKE_CURRENT_LIST_FILE)
  file(GLOB ours ${FOLDER}/bin/* ${FOLDER}/lib/*.so.* ${FOLDER}/lib/fake_cuda/*)
  tessera_distribution_libraries(others ${ours})
  file(INSTALL ${others} DESTINATION ${FOLDER}/lib TYPE SHARED_LIBRARY FOLLOW_SYMLINK_CHAIN)
endif()
