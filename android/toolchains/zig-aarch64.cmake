# CMake toolchain: static aarch64 programs by `zig cc` (clang, lld, musl). scripts/build-android passes
#   MKD_ZIG  folder of its wrappers cc, cxx, ar, ranlib, which already carry the target and the processor.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_C_COMPILER "${MKD_ZIG}/cc")
set(CMAKE_CXX_COMPILER "${MKD_ZIG}/cxx")
set(CMAKE_AR "${MKD_ZIG}/ar" CACHE FILEPATH "")
set(CMAKE_RANLIB "${MKD_ZIG}/ranlib" CACHE FILEPATH "")
set(CMAKE_TRY_COMPILE_PLATFORM_VARIABLES MKD_ZIG)
# Phones with 16 KiB pages refuse segments that are aligned to less. musl gives new threads 128 KiB of stack unless the program asks for more.
set(CMAKE_EXE_LINKER_FLAGS_INIT "-static -Wl,-z,max-page-size=16384 -Wl,-z,stack-size=8388608")
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)
set(CMAKE_FIND_ROOT_PATH_MODE_LIBRARY ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_INCLUDE ONLY)
