// stock-logits: stock llama.cpp, nothing of ours: greedy continuation of token ids, and the logits that each token was drawn from.
//
//   stock-logits MODEL.gguf N OUT.f32 ID...     prints the N ids; OUT: float32 [N][n_vocab]
//
// What tests/emulation compares the paged engine with on processors that this machine only emulates. Same choices as mkd-run --extra-bufts 0:
// CPU only, plain weights, the prompt in one batch, then token by token.

#include "ggml-backend.h"
#include "llama.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <vector>

int main(int argc, char ** argv) {
    if (argc < 5) {
        fprintf(stderr, "usage: stock-logits MODEL.gguf N OUT.f32 ID...\n");
        return 2;
    }
    llama_log_set([](ggml_log_level level, const char * text, void *) { level == GGML_LOG_LEVEL_ERROR ? (void) fputs(text, stderr) : void(); }, nullptr);
    ggml_backend_load_all();
    llama_model_params model_params = llama_model_default_params();
    model_params.use_extra_bufts    = false;
    model_params.n_gpu_layers       = 0;
    llama_model * model             = llama_model_load_from_file(argv[1], model_params);
    if (!model) {
        return 1;
    }
    llama_context_params params = llama_context_default_params();
    params.n_ctx = params.n_batch = 512;
    params.n_threads = params.n_threads_batch = 2;
    llama_context * ctx = llama_init_from_model(model, params);
    FILE *          out = fopen(argv[3], "wb");
    if (!ctx || !out) {
        return 1;
    }
    const size_t             n_vocab = (size_t) llama_vocab_n_tokens(llama_model_get_vocab(model));
    std::vector<llama_token> ids;
    for (int i = 4; i < argc; ++i) {
        ids.push_back(atoi(argv[i]));
    }
    for (int n = atoi(argv[2]); n > 0; --n) {
        if (llama_decode(ctx, llama_batch_get_one(ids.data(), (int32_t) ids.size())) != 0) {
            return 1;
        }
        const float * logits = llama_get_logits_ith(ctx, -1);
        if (fwrite(logits, sizeof(float), n_vocab, out) != n_vocab) {
            return 1;
        }
        ids.assign(1, (llama_token) (std::max_element(logits, logits + n_vocab) - logits));
        printf("%d\n", ids[0]);
    }
    const bool ok = fclose(out) == 0;
    llama_free(ctx);
    llama_model_free(model);
    return ok ? 0 : 1;
}
