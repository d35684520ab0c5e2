#include "llmopt/block_pool.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

namespace llmopt {

BlockPool::BlockPool(int32_t num_blocks)
    : max_reused_(num_blocks - num_blocks / 5),
      counts_(num_blocks),
      keys_(num_blocks),
      has_key_(num_blocks),
      was_reused_(num_blocks),
      list_(num_blocks, -1),
      next_(num_blocks + 2),
      before_(num_blocks + 2) {
  unused_.reserve(num_blocks);
  for (int32_t block = num_blocks - 1; block >= 0; --block) unused_.push_back(block);
  for (int32_t head = num_blocks; head < num_blocks + 2; ++head) next_[head] = before_[head] = head;
  index_.reserve(num_blocks);
}

void BlockPool::push(List list, int32_t block) {
  const int32_t head = num_blocks() + list;
  const int32_t last = before_[head];
  next_[last] = before_[head] = block;
  next_[block] = head;
  before_[block] = last;
  list_[block] = static_cast<int8_t>(list);
  ++sizes_[list];
}

void BlockPool::remove(int32_t block) {
  next_[before_[block]] = next_[block];
  before_[next_[block]] = before_[block];
  --sizes_[list_[block]];
  list_[block] = -1;
}

std::vector<int32_t> BlockPool::allocate(int32_t count) {
  if (count < 0 || count > num_unused()) throw std::logic_error("allocate() was called without checking num_free");
  std::vector<int32_t> blocks(unused_.end() - count, unused_.end());
  unused_.resize(unused_.size() - count);
  std::reverse(blocks.begin(), blocks.end());
  for (int32_t block : blocks) counts_[block] = 1;
  return blocks;
}

std::pair<std::vector<int32_t>, std::vector<BlockKey>> BlockPool::evict(int32_t count) {
  if (count < 0 || count > num_kept()) throw std::logic_error("more blocks were to be evicted than are kept");
  std::pair<std::vector<int32_t>, std::vector<BlockKey>> gone;
  for (; count > 0; --count) {
    const int32_t block = oldest(sizes_[kOnce] > 0 ? kOnce : kReused);
    gone.first.push_back(block);
    gone.second.push_back(keys_[block]);
    drop_key(block);
  }
  return gone;
}

void BlockPool::share(std::span<const int32_t> blocks) {
  for (int32_t block : blocks) {
    if (counts_.at(block) == 0) {
      if (list_[block] < 0) throw std::logic_error("a free block cannot be shared");
      remove(block);
    }
    ++counts_[block];
    was_reused_[block] = has_key_[block];
  }
}

void BlockPool::free(std::span<const int32_t> blocks) {
  std::vector<int32_t> kept;
  for (int32_t block : blocks) {
    if (counts_.at(block) <= 0) throw std::logic_error("a block was freed twice");
    if (--counts_[block] > 0) continue;
    if (has_key_[block]) {
      kept.push_back(block);
    } else {
      unused_.push_back(block);
    }
  }
  for (auto block = kept.rbegin(); block != kept.rend(); ++block) push(was_reused_[*block] ? kReused : kOnce, *block);
  while (sizes_[kReused] > max_reused_) {
    const int32_t block = oldest(kReused);
    remove(block);
    was_reused_[block] = 0;
    push(kOnce, block);
  }
}

bool BlockPool::set_key(int32_t block, BlockKey key) {
  if (counts_.at(block) <= 0) throw std::logic_error("a block that nobody holds cannot be given a key");
  if (has_key_[block]) throw std::logic_error("the block has a key already");
  if (!index_.emplace(key, block).second) return false;
  keys_[block] = key;
  has_key_[block] = 1;
  was_reused_[block] = 0;
  return true;
}

void BlockPool::drop_key(int32_t block) {
  if (!has_key_.at(block)) return;
  index_.erase(keys_[block]);
  has_key_[block] = was_reused_[block] = 0;
  if (list_[block] >= 0) {
    remove(block);
    unused_.push_back(block);
  }
}

int32_t BlockPool::find(BlockKey key) const {
  const auto found = index_.find(key);
  return found == index_.end() ? -1 : found->second;
}

std::vector<int32_t> BlockPool::kept() const {
  std::vector<int32_t> blocks;
  for (List list : {kOnce, kReused}) {
    const int32_t head = num_blocks() + list;
    for (int32_t block = next_[head]; block != head; block = next_[block]) blocks.push_back(block);
  }
  return blocks;
}

std::string BlockPool::error() const {
  std::vector<int32_t> places(num_blocks());
  for (int32_t block : unused_) {
    if (++places[block] > 1) return "a block is in the free list twice";
    if (counts_[block] != 0) return "a block in the free list is held";
    if (has_key_[block]) return "a block in the free list has a key";
  }
  const std::vector<int32_t> kept_blocks = kept();
  for (int32_t block : kept_blocks) {
    if (++places[block] > 1) return "a block is free and kept";
    if (counts_[block] != 0) return "a kept block is held";
    if (!has_key_[block]) return "a kept block has no key";
  }
  if (static_cast<int32_t>(kept_blocks.size()) != num_kept()) return "the lists of kept blocks are longer than counted";
  if (sizes_[kReused] > max_reused_) return "too many blocks are kept as used again";
  int32_t num_keys = 0;
  for (int32_t block = 0; block < num_blocks(); ++block) {
    if (counts_[block] == 0 && places[block] == 0) return "a block is held by nobody and not free";
    if (!has_key_[block]) continue;
    ++num_keys;
    if (find(keys_[block]) != block) return "the index does not find a block by its key";
  }
  if (num_keys != this->num_keys()) return "the index holds keys that no block has";
  return "";
}

}  // namespace llmopt
