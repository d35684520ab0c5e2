// All substrings of a text that grows at its end: how long a suffix of it occurred before, and what followed there.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace llmopt {

// Where a suffix was found.
struct SuffixMatch {
  int32_t length = 0;  // tokens that agree; 0: none
  int32_t end = -1;    // place of the last of them in the text
};

// An online suffix automaton (A. Blumer et al., "The smallest automaton recognizing the subwords of a text", 1985): a
// token costs amortised constant time, at most 2 states and 3 edges. Every state also knows where its substrings ended
// last. That place is passed on to kMaxUpdates suffixes of each prefix; shorter ones may name an older place, which is
// an occurrence as well.
class SuffixAutomaton {
 public:
  SuffixAutomaton() : states_(1), slots_(64, -1) {}

  int32_t size() const { return static_cast<int32_t>(text_.size()); }
  // Bytes that it holds.
  size_t num_bytes() const;

  void extend(std::span<const int64_t> tokens);

  // The longest suffix of the text that occurred before, and its latest earlier place.
  SuffixMatch last() const { return last_match_; }
  // The longest suffix of `tokens` that occurs anywhere in the text, and the latest place known of it.
  SuffixMatch find(std::span<const int64_t> tokens) const;

  // What followed a match, `count` tokens. A continuation that reaches the end of the text goes on with itself: a text
  // of period p is continued with this period. Ends early before a token below 0, which separates texts.
  std::vector<int64_t> follow(SuffixMatch match, int32_t count) const;

 private:
  static constexpr int kMaxUpdates = 64;

  struct State {
    int32_t length = 0;  // of its longest substring
    int32_t link = -1;   // the state of the longest suffix that occurs in more places
    int32_t end = -1;    // where its substrings ended last
    int32_t first_edge = -1;
  };
  struct Edge {
    int64_t token;
    int32_t from, to, next;  // next: of the same state, or -1
  };

  void push(int64_t token);
  int32_t edge(int32_t state, int64_t token) const;  // index of the edge, or -1
  void add_edge(int32_t state, int64_t token, int32_t to);
  size_t slot_of(int32_t state, int64_t token) const;
  void grow();

  std::vector<int64_t> text_;
  std::vector<State> states_;
  std::vector<Edge> edges_;
  std::vector<int32_t> slots_;  // open addressing: edge by (state, token); a power of two, at most half full
  int32_t last_ = 0;            // the state of the whole text
  SuffixMatch last_match_;
};

}  // namespace llmopt
