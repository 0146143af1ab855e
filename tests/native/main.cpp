// The one test program: every tests/native/*.cpp is linked into it. `mkd-tests -ltc` lists the cases, `-tc="lanes*"` runs some of them.

#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include <doctest/doctest.h>

#if defined(__SANITIZE_THREAD__)
// llama.cpp and its OpenMP are not instrumented: their barriers are invisible, their memcpy is not, so every matmul would be reported.
// Accesses made inside such libraries are ignored; all of our own, and all locks, are still checked. TSAN_OPTIONS adds to this.
extern "C" __attribute__((visibility("default"))) const char * __tsan_default_options();
extern "C" const char * __tsan_default_options() {
    return "ignore_noninstrumented_modules=1";
}
#endif
