#include "llmopt/prefix_index.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

namespace llmopt {
namespace {

constexpr int kMaxCompared = 64;  // followers that are compared with the part of a block that is left

}  // namespace

PrefixIndex::PrefixIndex(BlockPool& pool, int32_t block_size)
    : pool_(pool),
      block_size_(block_size),
      tokens_(static_cast<size_t>(pool.num_blocks()) * block_size, -1),
      digests_(pool.num_blocks()),
      durable_(pool.num_blocks()),
      serials_(pool.num_blocks()),
      parents_(pool.num_blocks()),
      older_(pool.num_blocks(), -1),
      newer_(pool.num_blocks(), -1),
      has_family_(pool.num_blocks()) {}

std::vector<Digest> PrefixIndex::hash_blocks(std::span<const uint8_t> last, std::span<const int64_t> ids) const {
  const size_t size = block_size_, count = ids.size() / size;
  std::vector<Digest> digests(count);
  std::vector<uint8_t> message;
  for (size_t i = 0; i < count; ++i) {
    message.assign(last.begin(), last.end());
    message.resize(last.size() + size * sizeof(int32_t));
    for (size_t j = 0; j < size; ++j) {
      const auto id = static_cast<int32_t>(ids[i * size + j]);
      std::memcpy(message.data() + last.size() + j * sizeof(id), &id, sizeof(id));
    }
    digests[i] = blake2b_256(message);
    last = digests[i];
  }
  return digests;
}

bool PrefixIndex::has_tokens(int32_t block, std::span<const int64_t> ids) const {
  const int32_t* own = tokens_.data() + static_cast<size_t>(block) * block_size_;
  if (!std::equal(ids.begin(), ids.end(), own)) return false;
  return static_cast<int32_t>(ids.size()) == block_size_ || own[ids.size()] == -1;
}

std::vector<int32_t> PrefixIndex::match(int64_t root, std::span<const BlockKey> keys, std::span<const int64_t> ids) {
  if (ids.size() < keys.size() * block_size_) throw std::invalid_argument("there are more keys than blocks of ids");
  std::vector<int32_t> blocks;
  for (size_t i = 0; i < keys.size(); ++i) {
    const int32_t block = pool_.find(keys[i]);
    if (block < 0) break;
    if (!has_tokens(block, ids.subspan(i * block_size_, block_size_))) {
      ++num_collisions_;
      break;
    }
    if (parents_[block] != root) break;
    root = serials_[block];
    blocks.push_back(block);
  }
  return blocks;
}

std::pair<int32_t, int32_t> PrefixIndex::match_part(int64_t serial, std::span<const int64_t> ids) const {
  const auto family = families_.find(serial);
  if (family == families_.end() || ids.empty()) return {-1, 0};
  ids = ids.first(std::min<size_t>(ids.size(), block_size_));
  std::pair<int32_t, int32_t> best{-1, 0};
  int32_t block = family->second.newest;
  for (int i = 0; i < kMaxCompared && block >= 0; ++i, block = older_[block]) {
    const int32_t* own = tokens_.data() + static_cast<size_t>(block) * block_size_;
    const auto same = static_cast<int32_t>(std::mismatch(ids.begin(), ids.end(), own).first - ids.begin());
    if (same >= best.second) best = {block, same};
  }
  return best;
}

int64_t PrefixIndex::enter_one(int32_t block, std::span<const int64_t> ids, BlockKey key, int64_t parent) {
  if (serials_.at(block) == 0 && pool_.set_key(block, key)) {
    int32_t* own = tokens_.data() + static_cast<size_t>(block) * block_size_;
    std::fill(std::copy(ids.begin(), ids.end(), own), own + block_size_, -1);
    serials_[block] = new_serial();
    join(block, parent);
    return serials_[block];
  }
  const int32_t found = pool_.find(key);
  if (found < 0) return 0;
  if (parents_[found] == parent && has_tokens(found, ids)) return serials_[found];
  ++num_collisions_;
  return 0;
}

std::pair<int32_t, int64_t> PrefixIndex::enter(std::span<const int32_t> blocks, std::span<const int64_t> ids,
                                               std::span<const BlockKey> keys, std::span<const Digest> digests,
                                               int64_t serial, bool is_durable) {
  if (std::min(keys.size(), digests.size()) < blocks.size() || ids.size() < blocks.size() * block_size_) {
    throw std::invalid_argument("there are more blocks than keys, digests or blocks of ids");
  }
  int32_t count = 0;
  for (const int32_t block : blocks) {
    if (block < 0) break;
    const auto own = ids.subspan(static_cast<size_t>(count) * block_size_, block_size_);
    const int64_t entered = enter_one(block, own, keys[count], serial);
    if (entered == 0) break;
    if (serials_[block] == entered) {
      digests_[block] = digests[count];
      durable_[block] = is_durable;
    }
    serial = entered;
    ++count;
  }
  return {count, serial};
}

void PrefixIndex::enter_part(int32_t block, std::span<const int64_t> ids, BlockKey key, int64_t serial) {
  if (static_cast<int64_t>(ids.size()) > block_size_) throw std::invalid_argument("a part is longer than a block");
  enter_one(block, ids, key, serial);
}

void PrefixIndex::join(int32_t block, int64_t parent) {
  const auto [family, is_new] = families_.try_emplace(parent, Family{block, block});
  older_[block] = is_new ? -1 : family->second.newest;
  newer_[block] = -1;
  if (!is_new) newer_[family->second.newest] = block;
  family->second.newest = block;
  parents_[block] = parent;
  has_family_[block] = 1;
}

void PrefixIndex::leave(int32_t block) {
  if (!has_family_[block]) return;
  has_family_[block] = 0;
  const int32_t older = older_[block], newer = newer_[block];
  if (older < 0 && newer < 0) {
    families_.erase(parents_[block]);
    return;
  }
  Family& family = families_.at(parents_[block]);
  (older < 0 ? family.oldest : newer_[older]) = newer;
  (newer < 0 ? family.newest : older_[newer]) = older;
}

void PrefixIndex::forget(std::span<const int32_t> blocks) {
  for (const int32_t block : blocks) {
    if (serials_.at(block) == 0) continue;
    leave(block);
    const auto own = families_.find(serials_[block]);
    if (own != families_.end()) {
      for (int32_t child = own->second.oldest; child >= 0; child = newer_[child]) has_family_[child] = 0;
      families_.erase(own);
    }
    serials_[block] = 0;
  }
}

std::vector<int32_t> PrefixIndex::followers(int64_t serial) const {
  std::vector<int32_t> blocks;
  const auto family = families_.find(serial);
  if (family == families_.end()) return blocks;
  for (int32_t block = family->second.oldest; block >= 0; block = newer_[block]) blocks.push_back(block);
  return blocks;
}

}  // namespace llmopt
