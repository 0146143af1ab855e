// Text of tokens: however a stream of bytes is cut, the text and the place where it stops are the same.

#include "doctest/doctest.h"
#include "session/text-stream.h"

#include <random>
#include <string>
#include <vector>

using mkd::TextStream;

namespace {

constexpr uint32_t kSeed = 20260101;
const std::string  kFffd = "\xEF\xBF\xBD";

struct Result {
    std::string text;
    bool        stopped;
    bool        operator==(const Result & other) const { return text == other.text && stopped == other.stopped; }
};

// Feeds pieces as a generation does: nothing more once it stopped.
Result read(const std::vector<std::string> & pieces, const std::vector<std::string> & stops, bool * whole_characters = nullptr) {
    TextStream  stream(stops);
    std::string text;
    for (const std::string & piece : pieces) {
        const std::string added = stream.feed(piece.data(), piece.size());
        if (whole_characters && !mkd::is_valid_utf8(added)) {
            *whole_characters = false;
        }
        text += added;
        if (stream.stopped()) {
            return { text, true };
        }
    }
    text += stream.finish();
    return { text, stream.stopped() };
}

Result read(const std::string & bytes, const std::vector<std::string> & stops = {}) { return read(std::vector<std::string>{ bytes }, stops); }

std::vector<std::string> cut(const std::string & bytes, std::mt19937 & rng) {
    std::vector<std::string> pieces;
    for (size_t i = 0; i < bytes.size();) {
        const size_t n = std::min<size_t>(bytes.size() - i, rng() % 5); // empty pieces too: control tokens have no text
        pieces.push_back(bytes.substr(i, n));
        i += n;
    }
    return pieces;
}

// Code points by the book, from the whole text at once: the oracle for valid text and for single broken characters.
std::string encode(uint32_t cp) {
    std::string out;
    if (cp < 0x80) {
        out += (char) cp;
    } else if (cp < 0x800) {
        out += (char) (0xC0 | cp >> 6);
        out += (char) (0x80 | (cp & 63));
    } else if (cp < 0x10000) {
        out += (char) (0xE0 | cp >> 12);
        out += (char) (0x80 | (cp >> 6 & 63));
        out += (char) (0x80 | (cp & 63));
    } else {
        out += (char) (0xF0 | cp >> 18);
        out += (char) (0x80 | (cp >> 12 & 63));
        out += (char) (0x80 | (cp >> 6 & 63));
        out += (char) (0x80 | (cp & 63));
    }
    return out;
}

bool is_scalar(uint32_t cp) { return cp < 0xD800 || (cp > 0xDFFF && cp <= 0x10FFFF); }

} // namespace

TEST_CASE("session: text: every Unicode scalar passes unchanged and only whole") {
    for (uint32_t cp = 0; cp <= 0x10FFFF; ++cp) {
        if (!is_scalar(cp)) {
            continue;
        }
        const std::string bytes = encode(cp);
        mkd::Utf8Stream   stream;
        std::string       out;
        for (size_t i = 0; i < bytes.size(); ++i) {
            if (!out.empty()) {
                FAIL("U+", cp, " was passed on after ", i, " bytes");
            }
            stream.feed(&bytes[i], 1, out);
        }
        if (out != bytes) {
            FAIL("U+", cp, " was changed");
        }
    }
}

TEST_CASE("session: text: what is not UTF-8 becomes U+FFFD, one for each maximal part") {
    // the results are Python's: bytes(...).decode("utf-8", "replace")
    CHECK(read("a\x80" "b").text == "a" + kFffd + "b");
    CHECK(read("\xC0\xAF").text == kFffd + kFffd);                     // overlong
    CHECK(read("\xE0\x80\xAF").text == kFffd + kFffd + kFffd);         // overlong
    CHECK(read("\xED\xA0\x80").text == kFffd + kFffd + kFffd);         // a surrogate
    CHECK(read("\xF4\x90\x80\x80").text == kFffd + kFffd + kFffd + kFffd); // above U+10FFFF
    CHECK(read("\xF0\x9F\x98x").text == kFffd + "x");                  // broken off
    CHECK(read("\xE2\x82\xE2\x82\xAC").text == kFffd + "\xE2\x82\xAC"); // broken off by another character
    CHECK(read("ok\xF0\x9F\x98").text == "ok" + kFffd);                // at the end
    CHECK(read("\xFF\xFE").text == kFffd + kFffd);
}

TEST_CASE("session: text: any bytes give valid UTF-8, in any pieces the same") {
    std::mt19937 rng(kSeed);
    for (int round = 0; round < 3000; ++round) {
        std::string bytes;
        for (uint32_t i = 0, n = rng() % 24; i < n; ++i) {
            const uint32_t kind = rng() % 4;
            const uint32_t cp   = rng() % 0x110000;
            bytes += kind == 0 ? std::string(1, (char) rng()) : kind == 1 ? encode(is_scalar(cp) ? cp : 'x') : std::string(1, (char) ('a' + rng() % 3));
        }
        bool         whole = true;
        const Result once  = read(bytes);
        CHECK(mkd::is_valid_utf8(once.text));
        CHECK(read(cut(bytes, rng), {}, &whole) == once);
        CHECK(whole);
    }
}

TEST_CASE("session: text: a stop string ends the text before itself") {
    CHECK(read("hello</s>world", { "</s>" }) == Result{ "hello", true });
    CHECK(read("hello</s", { "</s>" }) == Result{ "hello</s", false }); // never completed: shown at the end
    CHECK(read("stop", { "stop" }) == Result{ "", true });
    CHECK(read("aaab", { "aab" }) == Result{ "a", true });
    CHECK(read("abc", { "abcd", "bc" }) == Result{ "a", true }); // the first that is completed
    CHECK(read("xabc", { "bc", "abc" }) == Result{ "x", true }); // both end here: the longest
    CHECK(read("abc", { "" }) == Result{ "abc", false });
    CHECK(read("\xE2\x82", { kFffd }) == Result{ "", true });
    CHECK(read("5\xE2\x82\xAC!", { "\xE2\x82\xAC" }) == Result{ "5", true });
}

TEST_CASE("session: text: nothing of a possible stop string is shown early") {
    TextStream stream({ "\nUser:" });
    CHECK(stream.feed("hi\nUs", 5) == "hi");
    CHECK(stream.feed("e", 1) == "");
    CHECK(stream.feed("less", 4) == "\nUseless");
    CHECK(stream.feed("\n", 1) == "");
    CHECK(stream.finish() == "\n");
}

TEST_CASE("session: text: stop strings found in any pieces as a search over the whole text finds them") {
    std::mt19937 rng(kSeed + 1);
    for (int round = 0; round < 5000; ++round) {
        const auto random_text = [&rng](uint32_t n_max) {
            static const char * const letters[] = { "a", "b", "\xC3\xA4", "\xE2\x82\xAC" };
            std::string               text;
            for (uint32_t i = 0, n = rng() % n_max; i < n; ++i) {
                text += letters[rng() % 4];
            }
            return text;
        };
        const std::string        text = random_text(30);
        std::vector<std::string> stops;
        for (uint32_t i = 0, n = rng() % 4; i < n; ++i) {
            stops.push_back(random_text(5));
        }
        size_t first_end = std::string::npos, begin = text.size(); // of the stop that ends first; the longest of these
        for (const std::string & stop : stops) {
            const size_t at = stop.empty() ? std::string::npos : text.find(stop);
            if (at == std::string::npos) {
                continue;
            }
            if (at + stop.size() < first_end || (at + stop.size() == first_end && at < begin)) {
                first_end = at + stop.size();
                begin     = at;
            }
        }
        const Result expected{ text.substr(0, begin), first_end != std::string::npos };
        bool         whole = true;
        CHECK(read(cut(text, rng), stops, &whole) == expected);
        CHECK(whole);
    }
}
