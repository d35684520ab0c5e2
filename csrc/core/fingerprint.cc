#include "llmopt/fingerprint.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstddef>
#include <cstring>
#include <vector>

#include "llmopt/parallel.h"

namespace llmopt {
namespace {

constexpr int64_t kChunk = int64_t{1} << 20;  // what one thread takes; a part of the definition, as the lanes are
constexpr int kLanes = 8;                     // independent, because a multiplication takes several cycles
constexpr int64_t kBlock = kLanes * sizeof(uint64_t);
constexpr uint64_t kOdd = 0x9e3779b97f4a7c15;  // 2^64 / golden ratio

// One to one in either argument. The rotation brings the highest bits, which a product leaves where they are, down:
// without it, two changed signs would cancel.
uint64_t mix(uint64_t state, uint64_t word) { return std::rotl(state ^ word, 29) * kOdd; }

void mix_block(uint64_t* lanes, const std::byte* block) {
  uint64_t words[kLanes];
  std::memcpy(words, block, kBlock);  // any alignment
  for (int i = 0; i < kLanes; ++i) lanes[i] = mix(lanes[i], words[i]);
}

uint64_t of_chunk(const std::byte* data, int64_t num_bytes) {
  uint64_t lanes[kLanes];
  for (int i = 0; i < kLanes; ++i) lanes[i] = kOdd * static_cast<uint64_t>(i + 1);
  int64_t at = 0;
  for (; at + kBlock <= num_bytes; at += kBlock) mix_block(lanes, data + at);
  if (at < num_bytes) {
    std::byte last[kBlock] = {};
    std::memcpy(last, data + at, num_bytes - at);
    mix_block(lanes, last);
  }
  uint64_t state = mix(kOdd, static_cast<uint64_t>(num_bytes));
  for (const uint64_t lane : lanes) state = mix(state, lane ^ lane >> 32);
  return state;
}

}  // namespace

uint64_t fingerprint(const void* data, int64_t num_bytes, int num_threads) {
  const auto* bytes = static_cast<const std::byte*>(data);
  const int64_t num_chunks = (num_bytes + kChunk - 1) / kChunk;
  std::vector<uint64_t> found(num_chunks);
  std::atomic<int64_t> next{0};
  parallel_team(static_cast<int>(std::clamp<int64_t>(num_threads, 1, std::max<int64_t>(1, num_chunks))), [&](int, int) {
    for (int64_t i; (i = next.fetch_add(1)) < num_chunks;) {
      found[i] = of_chunk(bytes + i * kChunk, std::min(kChunk, num_bytes - i * kChunk));
    }
  });
  uint64_t state = mix(kOdd, static_cast<uint64_t>(num_bytes));
  for (const uint64_t chunk : found) state = mix(state, chunk);
  return state ^ state >> 32;
}

}  // namespace llmopt
