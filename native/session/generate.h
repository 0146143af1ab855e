// session/generate.h: prompt -> text, token by token.
//
// The loop: keep what the KV cache already has of the prompt, decode the rest, then sample, show, decode. It ends when the model ends its turn, a
// stop string is completed, n_predict tokens were made, the context is full, or somebody interrupts; that is a result, not an error.
//
// The last sampled token is shown but not decoded: the next prompt brings it. A token that ends the turn is neither shown nor counted.
// A model without a tokenizer gives ids without text and never ends its turn.

#pragma once

#include "session/session.h"

#include <string>
#include <vector>

namespace mkd {

struct GenerateRequest {
    const int32_t *          prompt    = nullptr;
    int32_t                  n_prompt  = 0;
    int32_t                  n_predict = -1; // -1: no bound
    mkd_sampling             sampling{};
    std::vector<std::string> stops; // UTF-8; empty ones are ignored
    mkd_token_callback       on_token = nullptr;
    void *                   user     = nullptr;
};

// Throws Error as Session::decode, and ARG, CONTEXT (the prompt alone is too long). Every interrupt that was asked for is used up by this call.
mkd_generated generate(Session & session, const GenerateRequest & request);

} // namespace mkd
