#ifndef _GNU_SOURCE
#    define _GNU_SOURCE 1 // dladdr
#endif

#include "base/process.h"

#include <cstdio>
#include <dlfcn.h>

namespace mkd {

uint64_t rss_anon_bytes() {
    FILE * file = fopen("/proc/self/status", "r");
    if (!file) {
        return 0;
    }
    char               line[256];
    unsigned long long anon = 0, all = 0;
    while (fgets(line, sizeof line, file)) {
        sscanf(line, "RssAnon: %llu kB", &anon);
        sscanf(line, "VmRSS: %llu kB", &all);
    }
    fclose(file);
    return (uint64_t) (anon ? anon : all) * 1024;
}

const void * symbol_seen_from(const void * inside, const char * symbol) {
    Dl_info info;
    if (!dladdr(inside, &info) || !info.dli_fname) {
        return nullptr;
    }
    void * library = dlopen(info.dli_fname, RTLD_NOLOAD | RTLD_LAZY);
    if (!library) {
        return nullptr;
    }
    const void * address = dlsym(library, symbol); // in the library and what it depends on
    dlclose(library);
    return address;
}

} // namespace mkd
