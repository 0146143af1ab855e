// tiny-package.h: a random MoE of some kB, as a stock GGUF and as a package, for tests of the engine.
//
// arch qwen2moe, Q4_0 experts with zero-mean weights, no tokenizer. Written with ggml's own GGUF writer, independently of `mkdeploy convert`, so
// that a mistake there and one in the reader cannot cancel out. Deterministic by seed.

#pragma once

#include <string>

struct TinyPackage {
    static constexpr int n_layer = 3, n_expert = 8, n_expert_used = 2, n_embd = 64, n_ff = 32, n_vocab = 96;

    explicit TinyPackage(unsigned seed = 1);
    ~TinyPackage(); // removes the folder

    std::string dir;     // scratch folder
    std::string gguf;    // stock model
    std::string package; // the same model as a package
    std::string shard;   // its only shard
    std::string manifest;
};
