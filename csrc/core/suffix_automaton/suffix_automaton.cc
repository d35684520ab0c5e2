#include "llmopt/suffix_automaton.h"

#include <algorithm>

namespace llmopt {

size_t SuffixAutomaton::num_bytes() const {
  return text_.capacity() * sizeof(int64_t) + states_.capacity() * sizeof(State) + edges_.capacity() * sizeof(Edge) +
         slots_.capacity() * sizeof(int32_t);
}

void SuffixAutomaton::extend(std::span<const int64_t> tokens) {
  for (const int64_t token : tokens) push(token);
}

void SuffixAutomaton::push(int64_t token) {
  const int32_t place = size();
  text_.push_back(token);
  const int32_t current = static_cast<int32_t>(states_.size());
  states_.push_back({.length = place + 1, .link = 0, .end = place});
  int32_t from = last_;
  while (from >= 0 && edge(from, token) < 0) {
    add_edge(from, token, current);
    from = states_[from].link;
  }
  if (from >= 0) {
    const int32_t target = edges_[edge(from, token)].to;
    if (states_[target].length == states_[from].length + 1) {
      states_[current].link = target;
    } else {
      const int32_t clone = static_cast<int32_t>(states_.size());
      states_.push_back({.length = states_[from].length + 1, .link = states_[target].link, .end = states_[target].end});
      for (int32_t index = states_[target].first_edge; index >= 0; index = edges_[index].next) {
        const Edge copied = edges_[index];  // the vector grows
        add_edge(clone, copied.token, copied.to);
      }
      for (int32_t index; from >= 0 && (index = edge(from, token)) >= 0 && edges_[index].to == target;) {
        edges_[index].to = clone;
        from = states_[from].link;
      }
      states_[target].link = states_[current].link = clone;
    }
  }
  last_ = current;
  int32_t suffix = states_[current].link;
  last_match_ = {states_[suffix].length, states_[suffix].end};
  for (int count = 0; suffix > 0 && count < kMaxUpdates; ++count, suffix = states_[suffix].link) {
    states_[suffix].end = place;
  }
}

SuffixMatch SuffixAutomaton::find(std::span<const int64_t> tokens) const {
  int32_t state = 0, length = 0;
  for (const int64_t token : tokens) {
    int32_t index = edge(state, token);
    while (index < 0 && state != 0) {
      state = states_[state].link;
      length = states_[state].length;
      index = edge(state, token);
    }
    if (index >= 0) {
      state = edges_[index].to;
      ++length;
    }
  }
  return {length, length > 0 ? states_[state].end : -1};
}

std::vector<int64_t> SuffixAutomaton::follow(SuffixMatch match, int32_t count) const {
  std::vector<int64_t> tokens;
  if (match.length <= 0 || match.end + 1 >= size()) return tokens;
  const int32_t period = size() - 1 - match.end;
  tokens.reserve(count);
  for (int32_t index = 0; index < count; ++index) {
    const int64_t token = index < period ? text_[match.end + 1 + index] : tokens[index - period];
    if (token < 0) break;
    tokens.push_back(token);
  }
  return tokens;
}

size_t SuffixAutomaton::slot_of(int32_t state, int64_t token) const {
  uint64_t hash = (static_cast<uint64_t>(state) << 32 ^ static_cast<uint64_t>(token)) * 0x9E3779B97F4A7C15ull;
  hash ^= hash >> 29;
  const size_t mask = slots_.size() - 1;
  size_t slot = hash & mask;
  while (slots_[slot] >= 0 && (edges_[slots_[slot]].from != state || edges_[slots_[slot]].token != token)) {
    slot = (slot + 1) & mask;
  }
  return slot;
}

int32_t SuffixAutomaton::edge(int32_t state, int64_t token) const { return slots_[slot_of(state, token)]; }

void SuffixAutomaton::add_edge(int32_t state, int64_t token, int32_t to) {
  if (2 * (edges_.size() + 1) > slots_.size()) grow();
  const size_t slot = slot_of(state, token);
  slots_[slot] = static_cast<int32_t>(edges_.size());
  edges_.push_back({token, state, to, states_[state].first_edge});
  states_[state].first_edge = slots_[slot];
}

void SuffixAutomaton::grow() {
  std::fill(slots_.begin(), slots_.end(), -1);
  slots_.resize(2 * slots_.size(), -1);
  for (size_t index = 0; index < edges_.size(); ++index) {
    slots_[slot_of(edges_[index].from, edges_[index].token)] = static_cast<int32_t>(index);
  }
}

}  // namespace llmopt
