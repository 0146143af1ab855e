#ifndef _GNU_SOURCE
#    define _GNU_SOURCE 1 // dl_iterate_phdr
#endif

#include "base/process.h"

#include <cstdio>
#include <cstring>
#include <link.h>
#include <set>
#include <string>

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

int n_loaded_libraries(const char * part) {
    struct Search {
        const char *          part;
        std::set<std::string> names;
    } search{ part, {} };
    dl_iterate_phdr(
        [](dl_phdr_info * info, size_t, void * data) {
            Search & found = *(Search *) data;
            if (info->dlpi_name && strstr(info->dlpi_name, found.part)) {
                found.names.insert(info->dlpi_name);
            }
            return 0;
        },
        &search);
    return (int) search.names.size();
}

} // namespace mkd
