// tools/options.cpp: the table and what reads it.

#include "tools/options.h"

#include <cerrno>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <thread>

namespace mkd_run {

namespace {

constexpr unsigned kEngine = kGenerate | kBench;
constexpr unsigned kAll    = kInfo | kGenerate | kBench | kIobench;

// The text that followed an option; each reader refuses what it cannot take.
struct Value {
    const char * option;
    const char * text;

    [[noreturn]] void refuse(const std::string & expected) const {
        throw UsageError(std::string(option) + " " + text + ": expected " + expected);
    }
    int64_t integer(int64_t low, int64_t high) const {
        char * end = nullptr;
        errno      = 0;
        const long long value = strtoll(text, &end, 10);
        if (end == text || *end != '\0' || errno != 0 || value < low || value > high) {
            refuse("an integer " + std::to_string(low) + ".." + std::to_string(high));
        }
        return value;
    }
    int32_t n(int32_t low = 0) const { return (int32_t) integer(low, INT32_MAX); }
    double  number() const {
        char * end = nullptr;
        const double value = strtod(text, &end);
        if (end == text || *end != '\0' || !std::isfinite(value)) {
            refuse("a number");
        }
        return value;
    }
    int choice(std::initializer_list<std::pair<const char *, int>> choices) const {
        std::string names;
        for (const auto & [name, value] : choices) {
            if (strcmp(name, text) == 0) {
                return value;
            }
            names += (names.empty() ? "" : ", ") + std::string(name);
        }
        refuse("one of " + names);
    }
    int kv_type() const { // ids of enum ggml_type, which GGUF fixes
        return choice({ { "f32", 0 }, { "f16", 1 }, { "bf16", 30 }, { "q8_0", 8 }, { "q4_0", 2 }, { "q4_1", 3 }, { "iq4_nl", 20 }, { "q5_0", 6 }, { "q5_1", 7 } });
    }
};

struct Option {
    const char * name;
    const char * value;    // what it takes; null: nothing
    unsigned     commands; // which commands know it
    const char * help;
    void (*set)(Options &, const Value &);
};

// clang-format off
const Option kOptions[] = {
    { "-m",              "PATH",  kEngine,   "package folder, or a GGUF file with --load mmap|none", [](Options & o, const Value & v) { o.path = v.text; } },
    { "--load",          "MODE",  kEngine,   "paged (default) | mmap | none",       [](Options & o, const Value & v) { o.params.load = v.choice({ { "paged", MKD_LOAD_PAGED }, { "mmap", MKD_LOAD_MMAP }, { "none", MKD_LOAD_NONE } }); } },
    { "--memory",        "BYTES", kEngine,   "memory budget of the engine; 0: none", [](Options & o, const Value & v) { o.params.memory_budget_bytes = (uint64_t) v.integer(0, INT64_MAX); } },
    { "--cache-slots",   "N",     kEngine,   "expert slots per MoE layer; 0: what the budget leaves", [](Options & o, const Value & v) { o.params.cache_slots = v.n(); } },
    { "-c",              "N",     kEngine,   "context; 0: the model's own (default 4096)", [](Options & o, const Value & v) { o.params.n_ctx = v.n(); } },
    { "-b",              "N",     kEngine,   "logical batch (default 2048)",        [](Options & o, const Value & v) { o.params.n_batch = v.n(1); } },
    { "-ub",             "N",     kEngine,   "physical batch (default 512)",        [](Options & o, const Value & v) { o.params.n_ubatch = v.n(1); } },
    { "-t",              "N",     kEngine,   "threads; 0: all cores",               [](Options & o, const Value & v) { o.params.n_threads = v.n(); } },
    { "-ctk",            "TYPE",  kEngine,   "type of the K cache (default f16)",   [](Options & o, const Value & v) { o.params.type_k = v.kv_type(); } },
    { "-ctv",            "TYPE",  kEngine,   "type of the V cache (default f16)",   [](Options & o, const Value & v) { o.params.type_v = v.kv_type(); } },
    { "--parallel",      "N",     kEngine,   "sequences (default 1)",               [](Options & o, const Value & v) { o.params.n_seq_max = v.n(1); } },
    { "--lanes",         "N",     kEngine | kIobench, "parallel reads; 0: the default", [](Options & o, const Value & v) { o.params.n_lanes = o.io.n_lanes = v.n(); } },
    { "--io",            "ENGINE", kEngine,  "auto (default) | pread | uring",      [](Options & o, const Value & v) { o.params.io = v.choice({ { "auto", MKD_IO_AUTO }, { "pread", MKD_IO_PREAD }, { "uring", MKD_IO_URING } }); } },
    { "--io-chunk",      "BYTES", kEngine,   "of one read; 0: the default",         [](Options & o, const Value & v) { o.params.io_chunk_bytes = (uint64_t) v.integer(0, INT64_MAX); } },
    { "--prefetch",      "MODE",  kEngine,   "off | router | temporal | auto (default)", [](Options & o, const Value & v) { o.params.prefetch = v.choice({ { "off", MKD_PREFETCH_OFF }, { "router", MKD_PREFETCH_ROUTER }, { "temporal", MKD_PREFETCH_TEMPORAL }, { "auto", MKD_PREFETCH_AUTO } }); } },
    { "--cache-policy",  "NAME",  kEngine,   "lru | lfu (default)",                 [](Options & o, const Value & v) { o.params.cache_policy = v.choice({ { "lru", MKD_CACHE_LRU }, { "lfu", MKD_CACHE_LFU } }); } },
    { "--whole-experts", nullptr, kEngine,   "compute an expert when all of it is there", [](Options & o, const Value &) { o.params.whole_experts = true; } },
    { "--buffered",      nullptr, kEngine | kIobench, "no O_DIRECT",                [](Options & o, const Value &)   { o.params.direct_io = o.io.direct_io = false; } },
    { "--verify",        "WHEN",  kEngine,   "first (default) | always | off",      [](Options & o, const Value & v) { o.params.verify = v.choice({ { "first", MKD_VERIFY_FIRST }, { "always", MKD_VERIFY_ALWAYS }, { "off", MKD_VERIFY_OFF } }); } },
    { "--extra-bufts",   "0|1",   kEngine,   "llama.cpp's repacked weights",        [](Options & o, const Value & v) { o.params.use_extra_bufts = v.integer(0, 1) != 0; } },
    { "--lora",          "FILE",  kEngine,   "LoRA adapter, a GGUF",                [](Options & o, const Value & v) { o.lora = v.text; } },
    { "--lora-scale",    "X",     kEngine,   "its weight (default 1)",              [](Options & o, const Value & v) { o.params.lora_scale = (float) v.number(); } },
    { "--throttle",      "CURVE", kEngine | kIobench, "slow reads to block_bytes:lanes:bytes_per_s,... (default $MKD_THROTTLE)", [](Options & o, const Value & v) { o.throttle = v.text; } },
    { "--device",        "NAME",  kEngine,   "ggml device that computes experts",   [](Options & o, const Value & v) { o.device = v.text; } },

    { "-p",              "TEXT",  kGenerate, "prompt",                              [](Options & o, const Value & v) { o.prompt = v.text; o.has_prompt = true; } },
    { "-f",              "FILE",  kGenerate, "prompt from a file",                  [](Options & o, const Value & v) { o.prompt_file = v.text; } },
    { "--requests",      nullptr, kGenerate, "prompts from stdin, one JSON object a line", [](Options & o, const Value &) { o.requests = true; } },
    { "-n",              "N",     kGenerate, "tokens to make; -1: until the model stops", [](Options & o, const Value & v) { o.n_predict = v.n(-1); } },
    { "--temp",          "X",     kGenerate, "temperature; 0: greedy (default 0.8)", [](Options & o, const Value & v) { o.sampling.temp = (float) v.number(); } },
    { "--top-k",         "N",     kGenerate, "0: off (default 40)",                 [](Options & o, const Value & v) { o.sampling.top_k = (int32_t) v.integer(INT32_MIN, INT32_MAX); } },
    { "--top-p",         "X",     kGenerate, "1: off (default 0.95)",               [](Options & o, const Value & v) { o.sampling.top_p = (float) v.number(); } },
    { "--min-p",         "X",     kGenerate, "0: off (default 0.05)",               [](Options & o, const Value & v) { o.sampling.min_p = (float) v.number(); } },
    { "--seed",          "N",     kGenerate, "-1: random (default)",                [](Options & o, const Value & v) { o.sampling.seed = (uint32_t) v.integer(-1, UINT32_MAX); } },
    { "--grammar-file",  "FILE",  kGenerate, "GBNF grammar",                        [](Options & o, const Value & v) { o.grammar_file = v.text; } },
    { "--stop",          "TEXT",  kGenerate, "stop before this text (repeatable)",  [](Options & o, const Value & v) { o.stops.push_back(v.text); } },
    { "--logits",        "FILE",  kGenerate, "write what each token was drawn from: float32 [n_tokens][n_vocab]", [](Options & o, const Value & v) { o.logits_file = v.text; } },

    { "--tokens",        "FILE",  kBench,    "token ids, raw little-endian int32",  [](Options & o, const Value & v) { o.tokens_file = v.text; } },
    { "-p",              "N",     kBench,    "test a prompt of N tokens (repeatable, default 512)", [](Options & o, const Value & v) { o.n_prompt.push_back(v.n()); } },
    { "-n",              "N",     kBench,    "test N tokens one by one (repeatable, default 128)", [](Options & o, const Value & v) { o.n_gen.push_back(v.n()); } },
    { "-r",              "N",     kBench,    "repetitions (default 5)",             [](Options & o, const Value & v) { o.reps = v.n(1); } },
    { "--cold",          nullptr, kEngine,   "drop every expert after each pass",   [](Options & o, const Value &)   { o.cold = true; } },
    { "--no-warmup",     nullptr, kBench,    "count the first repetition too",      [](Options & o, const Value &)   { o.warmup = false; } },
    { "--paced",         nullptr, kBench,    "wait for a line before each one",     [](Options & o, const Value &)   { o.paced = true; } },

    { "--path",          "PATH",  kIobench,  "file to read, or folder for a scratch file", [](Options & o, const Value & v) { o.io_path = v.text; } },
    { "--block",         "BYTES", kIobench,  "block size, a multiple of 4096",      [](Options & o, const Value & v) { o.io.block_bytes = (uint64_t) v.integer(1, INT64_MAX); } },
    { "--sequential",    nullptr, kIobench,  "in order; default: random",           [](Options & o, const Value &)   { o.io.sequential = true; } },
    { "--bytes",         "N",     kIobench,  "stop after this much (default 256 MiB)", [](Options & o, const Value & v) { o.io.total_bytes = (uint64_t) v.integer(1, INT64_MAX); } },
    { "--seconds",       "S",     kIobench,  "or after this long (default 10)",     [](Options & o, const Value & v) { const double s = v.number(); if (s <= 0 || s > 1e6) { v.refuse("seconds above 0"); } o.io.max_us = (int64_t) (s * 1e6); } },

    { "--log",           nullptr, kAll,      "llama.cpp's log on stderr (also MKD_DEBUG=1)", [](Options & o, const Value &) { o.log = true; } },
    { "--help",          nullptr, kAll,      "this text",                           [](Options & o, const Value &)   { o.help = true; } },
};
// clang-format on

struct CommandName {
    Command      command;
    const char * name;
    const char * help;
};
const CommandName kCommands[] = {
    { kInfo, "info", "versions" },
    { kGenerate, "generate", "prompt -> text, or requests from stdin" },
    { kBench, "bench", "speed of prompts (pp) and of single tokens (tg)" },
    { kIobench, "iobench", "speed of the storage" },
};

const Option * find_option(const char * name, unsigned command) {
    for (const Option & option : kOptions) {
        if ((option.commands & command) && strcmp(option.name, name) == 0) {
            return &option;
        }
    }
    return nullptr;
}

void require_option(bool given, const char * command, const char * what) {
    if (!given) {
        throw UsageError(std::string(command) + " needs " + what);
    }
}

void check_complete(Options & o) {
    if (o.throttle.empty()) { // an emulated phone's flash, for everything that runs on it
        const char * curve = getenv("MKD_THROTTLE");
        o.throttle         = curve ? curve : "";
    }
    if (o.command & kEngine) {
        require_option(!o.path.empty(), o.command == kBench ? "bench" : "generate", "-m PATH");
        if (o.params.n_threads == 0) {
            o.params.n_threads = std::max(1, (int) std::thread::hardware_concurrency());
        }
    }
    if (o.command == kGenerate && o.has_prompt + !o.prompt_file.empty() + o.requests != 1) {
        throw UsageError("generate needs one of -p TEXT, -f FILE and --requests");
    }
    if (o.command == kBench) {
        require_option(!o.tokens_file.empty(), "bench", "--tokens FILE");
        if (o.n_prompt.empty() && o.n_gen.empty()) {
            o.n_prompt = { 512 };
            o.n_gen    = { 128 };
        }
    }
    if (o.command == kIobench) {
        require_option(!o.io_path.empty(), "iobench", "--path PATH");
        require_option(o.io.block_bytes > 0, "iobench", "--block BYTES");
        require_option(o.io.n_lanes > 0, "iobench", "--lanes N, at least 1");
    }
}

} // namespace

mkd_session_params Options::engine() const {
    mkd_session_params p = params;
    p.path               = path.c_str();
    p.lora_path          = lora.empty() ? nullptr : lora.c_str();
    p.throttle           = throttle.empty() ? nullptr : throttle.c_str();
    p.device             = device.empty() ? nullptr : device.c_str();
    p.n_outputs_max      = p.n_seq_max; // only ever the last token's logits; llama.cpp wants a row for every sequence
    return p;
}

mkd_iobench_params Options::iobench() const {
    mkd_iobench_params p = io;
    p.path               = io_path.c_str();
    p.throttle           = throttle.empty() ? nullptr : throttle.c_str();
    return p;
}

Options parse_options(int argc, char ** argv) {
    Options options;
    options.io.struct_bytes = sizeof(options.io);
    options.io.direct_io    = true;
    options.io.total_bytes  = 256u << 20;
    options.io.max_us       = 10'000'000;
    if (argc < 2) {
        throw UsageError("a command is missing: info, generate, bench or iobench");
    }
    if (strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "-h") == 0) {
        options.help = true;
        return options;
    }
    const CommandName * command = nullptr;
    for (const CommandName & known : kCommands) {
        command = strcmp(known.name, argv[1]) == 0 ? &known : command;
    }
    if (!command) {
        throw UsageError(std::string("unknown command '") + argv[1] + "': expected info, generate, bench or iobench");
    }
    options.command = command->command;
    for (int i = 2; i < argc; ++i) {
        const Option * option = find_option(argv[i], options.command);
        if (!option) {
            throw UsageError(std::string(command->name) + " has no option '" + argv[i] + "'");
        }
        if (option->value && i + 1 >= argc) {
            throw UsageError(std::string(option->name) + " needs a value (" + option->value + ")");
        }
        option->set(options, { option->name, option->value ? argv[++i] : "" });
    }
    if (!options.help) {
        check_complete(options);
    }
    return options;
}

std::string usage() {
    std::string text = "usage: mkd-run COMMAND [options]; JSON lines on stdout (docs/engine-protocol.md)\n";
    for (const CommandName & command : kCommands) {
        text += std::string("\n  mkd-run ") + command.name + "   " + command.help + "\n";
        for (const Option & option : kOptions) {
            if (option.commands & command.command) {
                std::string left = std::string(option.name) + (option.value ? std::string(" ") + option.value : "");
                left.resize(std::max<size_t>(left.size() + 1, 20), ' ');
                text += "    " + left + option.help + "\n";
            }
        }
    }
    return text;
}

} // namespace mkd_run
