#include "llmopt/blake2b.h"

#include <algorithm>
#include <bit>
#include <cstring>

namespace llmopt {
namespace {

static_assert(std::endian::native == std::endian::little, "words are read as they lie in memory");

constexpr size_t kBlockBytes = 128;
constexpr int kNumRounds = 12;

constexpr std::array<uint64_t, 8> kInitial = {
    0x6A09E667F3BCC908, 0xBB67AE8584CAA73B, 0x3C6EF372FE94F82B, 0xA54FF53A5F1D36F1,
    0x510E527FADE682D1, 0x9B05688C2B3E6C1F, 0x1F83D9ABFB41BD6B, 0x5BE0CD19137E2179,
};

// Which words of the message the rounds take, in order; the last two rounds begin again.
constexpr uint8_t kOrder[10][16] = {
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}, {14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3},
    {11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4}, {7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8},
    {9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13}, {2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9},
    {12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11}, {13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10},
    {6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5}, {10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0},
};

using State = std::array<uint64_t, 8>;

void mix(uint64_t (&v)[16], int a, int b, int c, int d, uint64_t x, uint64_t y) {
  v[a] += v[b] + x;
  v[d] = std::rotr(v[d] ^ v[a], 32);
  v[c] += v[d];
  v[b] = std::rotr(v[b] ^ v[c], 24);
  v[a] += v[b] + y;
  v[d] = std::rotr(v[d] ^ v[a], 16);
  v[c] += v[d];
  v[b] = std::rotr(v[b] ^ v[c], 63);
}

// num_bytes: of the message up to the end of this block.
void compress(State& state, const uint8_t* block, uint64_t num_bytes, bool is_last) {
  uint64_t words[16], v[16];
  std::memcpy(words, block, kBlockBytes);
  std::copy(state.begin(), state.end(), v);
  std::copy(kInitial.begin(), kInitial.end(), v + 8);
  v[12] ^= num_bytes;
  if (is_last) v[14] = ~v[14];
  for (int round = 0; round < kNumRounds; ++round) {
    const uint8_t* at = kOrder[round % 10];
    for (int i = 0; i < 4; ++i) mix(v, i, 4 + i, 8 + i, 12 + i, words[at[2 * i]], words[at[2 * i + 1]]);
    for (int i = 0; i < 4; ++i) {
      mix(v, i, 4 + (i + 1) % 4, 8 + (i + 2) % 4, 12 + (i + 3) % 4, words[at[8 + 2 * i]], words[at[9 + 2 * i]]);
    }
  }
  for (int i = 0; i < 8; ++i) state[i] ^= v[i] ^ v[8 + i];
}

}  // namespace

Digest blake2b_256(std::span<const uint8_t> data) {
  Digest digest;
  State state = kInitial;
  state[0] ^= 0x01010000 ^ digest.size();  // fan-out and depth 1: no tree; no key
  size_t at = 0;
  for (; data.size() - at > kBlockBytes; at += kBlockBytes) compress(state, data.data() + at, at + kBlockBytes, false);
  uint8_t last[kBlockBytes] = {};
  std::copy(data.begin() + at, data.end(), last);
  compress(state, last, data.size(), true);
  std::memcpy(digest.data(), state.data(), digest.size());
  return digest;
}

}  // namespace llmopt
