// Names of expert tensors: the parser takes exactly the names of docs/package-format.md.

#include "store/package-index.h"

#include <doctest/doctest.h>

using namespace mkd;

TEST_CASE("expert tensor names: merged and per expert") {
    int      layer = -1, expert = -1;
    PartRole role;
    CHECK(parse_expert_tensor_name("blk.0.ffn_up_exps.weight", &layer, &role, &expert));
    CHECK(layer == 0);
    CHECK(role == PartRole::up);
    CHECK(expert == -1);
    CHECK(parse_expert_tensor_name("blk.93.ffn_gate_up_exps.127.weight", &layer, &role, &expert));
    CHECK(layer == 93);
    CHECK(role == PartRole::gate_up);
    CHECK(expert == 127);
    CHECK(parse_expert_tensor_name("blk.7.ffn_gate_exps.3.weight", &layer, &role, &expert));
    CHECK(role == PartRole::gate);
    CHECK(parse_expert_tensor_name("blk.7.ffn_down_exps.3.weight", &layer, &role, &expert));
    CHECK(role == PartRole::down);
}

TEST_CASE("expert tensor names: everything else is refused") {
    int      layer, expert;
    PartRole role;
    for (const char * name :
         { "", "blk", "blk.", "blk.0", "blk.0.ffn_up.weight", "blk.0.ffn_up_exps.bias", "blk.0.ffn_up_exps.weight2", "blk.-1.ffn_up_exps.weight",
           "blk.0.ffn_up_shexp.weight", "blk.0.ffn_up_exps..weight", "blk.0.ffn_up_exps.1", "blk.0.ffn_up_exps.x.weight",
           "blk.99999999999999999999.ffn_up_exps.weight", "blk.0.ffn_up_exps.99999999999999999999.weight", "blk.0.ffn_gate_inp.weight" }) {
        CAPTURE(name);
        CHECK_FALSE(parse_expert_tensor_name(name, &layer, &role, &expert));
    }
}
