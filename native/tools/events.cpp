// tools/events.cpp: see the header.

#include "tools/events.h"

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <sys/resource.h>
#include <unistd.h>

namespace mkd_run {

void check(mkd_status status) {
    if (status != MKD_OK) {
        throw Failure(status, mkd_last_error());
    }
}

void emit(const char * name, const Json & fields) {
    Json event = { { "event", name } };
    event.update(fields);
    const std::string line = event.dump(-1, ' ', false, Json::error_handler_t::replace) + "\n";
    for (size_t done = 0; done < line.size();) {
        const ssize_t n = write(STDOUT_FILENO, line.data() + done, line.size() - done);
        if (n < 0 && errno != EINTR) {
            throw BrokenOutput();
        }
        done += n > 0 ? (size_t) n : 0;
    }
}

void emit_note(const char * text) {
    if (*text) {
        emit("note", { { "text", text } });
    }
}

// ---------------------------------------------------------------- structs, fields as in mkd.h

#define FIELD(name) { #name, s.name }

Json to_json(const mkd_model_info & s) {
    return { FIELD(n_layer), FIELD(n_moe_layer), FIELD(n_expert), FIELD(n_expert_used), FIELD(n_vocab), FIELD(n_embd), FIELD(n_ctx_train),
             FIELD(n_ctx), FIELD(n_batch), FIELD(n_ubatch), FIELD(n_seq_max), FIELD(expert_payload_bytes), FIELD(expert_stride_bytes),
             FIELD(n_params), FIELD(model_bytes), FIELD(has_encoder), FIELD(add_bos), FIELD(desc), FIELD(arch) };
}

Json to_json(const mkd_memory_info & s) {
    return { FIELD(budget_bytes), FIELD(resident_bytes), FIELD(kv_bytes), FIELD(compute_bytes), FIELD(slots_bytes), FIELD(work_bytes),
             FIELD(other_bytes), FIELD(total_bytes), FIELD(slots_per_layer), FIELD(n_slots), FIELD(minimum_bytes) };
}

Json to_json(const mkd_load_info & s) {
    return { FIELD(load_us), FIELD(resident_read_bytes), FIELD(routed_requested_bytes), FIELD(direct_io), FIELD(io), FIELD(n_lanes),
             FIELD(io_chunk_bytes), FIELD(note) };
}

Json to_json(const mkd_stats & s) {
    return { FIELD(n_decode), FIELD(n_tokens), FIELD(n_requests), FIELD(n_hits), FIELD(n_misses), FIELD(n_evictions), FIELD(n_reads),
             FIELD(read_bytes), FIELD(payload_bytes), FIELD(load_us), FIELD(io_busy_us), FIELD(stall_us), FIELD(expert_compute_us), FIELD(n_layer_batches),
             FIELD(n_waves), FIELD(n_checksums), FIELD(n_reread), FIELD(n_prefetch), FIELD(n_prefetch_hits), FIELD(n_prefetch_useless),
             FIELD(n_prefetch_cancelled), FIELD(prefetch_bytes), FIELD(prefetch_waste_bytes) };
}

Json to_json(const mkd_iobench_result & s) {
    return { FIELD(bytes), FIELD(n_reads), FIELD(elapsed_us), FIELD(bytes_per_s), FIELD(latency_us_p50), FIELD(latency_us_p99), FIELD(direct_io),
             FIELD(note) };
}

#undef FIELD

const char * stop_name(int32_t stop) {
    switch (stop) {
        case MKD_STOP_LENGTH:      return "length";
        case MKD_STOP_EOG:         return "eog";
        case MKD_STOP_STRING:      return "string";
        case MKD_STOP_CONTEXT:     return "context";
        case MKD_STOP_INTERRUPTED: return "interrupted";
        default:                   return "?";
    }
}

// ---------------------------------------------------------------- process

static uint64_t proc_status_bytes(const char * key) {
    FILE * file = fopen("/proc/self/status", "r");
    if (!file) {
        return 0;
    }
    char               line[256];
    unsigned long long kib = 0;
    while (fgets(line, sizeof line, file)) {
        if (strncmp(line, key, strlen(key)) == 0) {
            sscanf(line + strlen(key), "%llu", &kib);
        }
    }
    fclose(file);
    return (uint64_t) kib * 1024;
}

uint64_t rss_bytes() { return proc_status_bytes("VmRSS:"); }
uint64_t rss_peak_bytes() { return proc_status_bytes("VmHWM:"); }

int64_t majflt() {
    struct rusage usage {};
    getrusage(RUSAGE_SELF, &usage);
    return usage.ru_majflt;
}

} // namespace mkd_run
