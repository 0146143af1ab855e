// session/text-stream.cpp: the byte ranges are table 3-7 of the Unicode standard.

#include "session/text-stream.h"

#include <algorithm>

namespace mkd {

namespace {

constexpr const char * kReplacement = "\xEF\xBF\xBD"; // U+FFFD

bool ends_with(const std::string & text, const std::string & end) {
    return text.size() >= end.size() && text.compare(text.size() - end.size(), end.size(), end) == 0;
}

} // namespace

// ---------------------------------------------------------------- UTF-8

void Utf8Stream::put(uint8_t byte, std::string & out) {
    if (n_need_ > 0) {
        if (byte >= low_ && byte <= high_) {
            pending_ += (char) byte;
            low_  = 0x80;
            high_ = 0xBF;
            if (--n_need_ == 0) {
                out += pending_;
                pending_.clear();
            }
            return;
        }
        out += kReplacement; // the character broke off; this byte begins something new
        pending_.clear();
        n_need_ = 0;
    }
    if (byte < 0x80) {
        out += (char) byte;
        return;
    }
    if (byte < 0xC2 || byte > 0xF4) {
        out += kReplacement;
        return;
    }
    n_need_ = byte < 0xE0 ? 1 : byte < 0xF0 ? 2 : 3;
    low_    = byte == 0xE0 ? 0xA0 : byte == 0xF0 ? 0x90 : 0x80; // no overlong forms
    high_   = byte == 0xED ? 0x9F : byte == 0xF4 ? 0x8F : 0xBF; // no surrogates, nothing above U+10FFFF
    pending_ += (char) byte;
}

void Utf8Stream::feed(const char * bytes, size_t n, std::string & out) {
    for (size_t i = 0; i < n; ++i) {
        put((uint8_t) bytes[i], out);
    }
}

void Utf8Stream::finish(std::string & out) {
    if (n_need_ > 0) {
        out += kReplacement;
    }
    pending_.clear();
    n_need_ = 0;
}

bool is_valid_utf8(const std::string & text) {
    Utf8Stream  stream;
    std::string out;
    stream.feed(text.data(), text.size(), out);
    stream.finish(out);
    return out == text;
}

// ---------------------------------------------------------------- stop strings

StopMatcher::StopMatcher(std::vector<std::string> stops) : stops_(std::move(stops)) {
    stops_.erase(std::remove(stops_.begin(), stops_.end(), std::string()), stops_.end());
}

bool StopMatcher::feed(const std::string & text, std::string & out) {
    // byte by byte: the first stop string that is completed counts, however the text is cut
    for (const char byte : text) {
        if (stopped_) {
            return true;
        }
        held_ += byte;
        size_t n_match = 0;
        for (const std::string & stop : stops_) {
            if (stop.size() > n_match && ends_with(held_, stop)) {
                n_match = stop.size();
            }
        }
        if (n_match > 0) {
            out.append(held_, 0, held_.size() - n_match);
            held_.clear();
            stopped_ = true;
        }
    }
    size_t n_hold = 0; // the longest end of the text that begins a stop string
    for (const std::string & stop : stops_) {
        for (size_t n = std::min(stop.size() - 1, held_.size()); n > n_hold; --n) {
            if (held_.compare(held_.size() - n, n, stop, 0, n) == 0) {
                n_hold = n;
            }
        }
    }
    out.append(held_, 0, held_.size() - n_hold);
    held_.erase(0, held_.size() - n_hold);
    return stopped_;
}

void StopMatcher::finish(std::string & out) {
    out += held_;
    held_.clear();
}

// ---------------------------------------------------------------- both

std::string TextStream::feed(const char * bytes, size_t n) {
    std::string text, out;
    utf8_.feed(bytes, n, text);
    matcher_.feed(text, out);
    return out;
}

std::string TextStream::finish() {
    std::string text, out;
    utf8_.finish(text);
    if (!matcher_.feed(text, out)) { // U+FFFD may complete a stop string
        matcher_.finish(out);
    }
    return out;
}

} // namespace mkd
