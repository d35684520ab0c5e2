// Which KV blocks are held, free, or kept because their content may be asked for again.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

namespace llmopt {

// 128 bits that stand for the content of a block.
struct BlockKey {
  uint64_t low, high;

  bool operator==(const BlockKey&) const = default;
};

struct HashOfKey {
  size_t operator()(const BlockKey& key) const { return key.low ^ (key.high * 0x9E3779B97F4A7C15ull); }
};

// Every block is in one of three states: held (its count is positive), unused (count 0, no key: in a stack) or kept
// (count 0, with a key: in a list by last use). A key names one block at most.
//
// Kept blocks are evicted from the list of those that were used once, oldest first, and then from the list of those
// that were used again. The second list holds max_reused blocks; what falls out of it is used once again. So a long
// prompt that comes once cannot drive out one that comes often.
class BlockPool {
 public:
  explicit BlockPool(int32_t num_blocks);

  int32_t num_blocks() const { return static_cast<int32_t>(counts_.size()); }
  int32_t num_unused() const { return static_cast<int32_t>(unused_.size()); }
  int32_t num_kept() const { return sizes_[kOnce] + sizes_[kReused]; }
  int32_t num_keys() const { return static_cast<int32_t>(index_.size()); }

  // Takes unused blocks, those freed last first. The calls below throw std::logic_error when they are asked for what
  // the state does not allow.
  std::vector<int32_t> allocate(int32_t count);
  // Makes the `count` least valuable kept blocks unused; returns them and the keys that they had.
  std::pair<std::vector<int32_t>, std::vector<BlockKey>> evict(int32_t count);
  // Holds blocks once more. A kept block comes back to life.
  void share(std::span<const int32_t> blocks);
  // Gives blocks back. Of those with keys, the first of the call is evicted last: it is the head of a sequence.
  void free(std::span<const int32_t> blocks);
  // Puts unused blocks in order, so that the next ones taken are neighbours.
  void sort_unused() { std::sort(unused_.begin(), unused_.end(), std::greater<>()); }

  // Gives a held block a key. False: another block has it, and nothing changes.
  bool set_key(int32_t block, BlockKey key);
  // Takes the key from a block, if it has one; a kept one becomes unused.
  void drop_key(int32_t block);
  // The block with this key, or -1.
  int32_t find(BlockKey key) const;
  bool has_key(int32_t block) const { return has_key_.at(block) != 0; }
  BlockKey key(int32_t block) const { return keys_.at(block); }

  std::vector<int32_t>& counts() { return counts_; }
  const std::vector<int32_t>& unused() const { return unused_; }
  // Kept blocks in the order in which they would be evicted.
  std::vector<int32_t> kept() const;
  // What is wrong with the state, or nothing.
  std::string error() const;

 private:
  enum List { kOnce = 0, kReused = 1 };

  void push(List list, int32_t block);  // as the one used last
  void remove(int32_t block);
  int32_t oldest(List list) const { return next_[num_blocks() + list]; }

  int32_t max_reused_;
  std::vector<int32_t> counts_;
  std::vector<int32_t> unused_;
  std::vector<BlockKey> keys_;
  std::vector<uint8_t> has_key_, was_reused_;
  std::vector<int8_t> list_;            // -1: in none
  std::vector<int32_t> next_, before_;  // rings; the last two places are the heads of the lists
  std::array<int32_t, 2> sizes_{};
  std::unordered_map<BlockKey, int32_t, HashOfKey> index_;
};

}  // namespace llmopt
