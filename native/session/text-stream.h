// session/text-stream.h: bytes of tokens -> text that may be shown.
//
// Two pure stages, no model needed. Utf8Stream turns any bytes into valid UTF-8: a character is passed on once it is whole, bytes that cannot be
// one become U+FFFD, one for each maximal part of a character (Unicode 3.9, as Python's errors="replace"). StopMatcher holds back text that
// may be the beginning of a stop string and cuts the text before the first one that is completed; of several that end at the same byte the
// longest counts.
//
// Guarantee: how the bytes are cut into tokens changes neither the text nor where it stops.

#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace mkd {

class Utf8Stream {
  public:
    void feed(const char * bytes, size_t n, std::string & out); // appends to out
    void finish(std::string & out);                             // an unfinished character becomes U+FFFD

  private:
    void put(uint8_t byte, std::string & out);

    std::string pending_;     // bytes of an unfinished character
    int         n_need_ = 0;  // bytes that it still lacks
    uint8_t     low_    = 0x80, high_ = 0xBF; // range of its next byte
};

class StopMatcher {
  public:
    explicit StopMatcher(std::vector<std::string> stops); // empty strings are ignored

    // Appends to out what is certainly not a part of a stop string. True: one was completed; from then on nothing is accepted.
    bool feed(const std::string & text, std::string & out);
    void finish(std::string & out); // what was held back, if no stop string was completed
    bool stopped() const { return stopped_; }

  private:
    std::vector<std::string> stops_;
    std::string              held_; // always a proper beginning of a stop string between calls
    bool                     stopped_ = false;
};

class TextStream {
  public:
    explicit TextStream(std::vector<std::string> stops) : matcher_(std::move(stops)) {}

    // The text that a token adds (maybe empty). stopped(): a stop string was completed.
    std::string feed(const char * bytes, size_t n);
    std::string finish(); // the rest, at the end of the answer
    bool        stopped() const { return matcher_.stopped(); }

  private:
    Utf8Stream  utf8_;
    StopMatcher matcher_;
};

bool is_valid_utf8(const std::string & text);

} // namespace mkd
