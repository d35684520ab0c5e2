// What the kept blocks of a pool hold: their tokens, and which block each of them follows.
#pragma once

#include <cstdint>
#include <span>
#include <unordered_map>
#include <utility>
#include <vector>

#include "llmopt/blake2b.h"
#include "llmopt/block_pool.h"

namespace llmopt {

// Sequences are found by the chained digests of their blocks, and believed only when the tokens are the same. Every
// entry has a serial number of its own and that of the entry before it; at the beginning of a sequence stands the
// number of a salt. A block is right when its tokens are, and when it follows the block found before it.
//
// A block that leaves the pool's keys (evicted, or dropped) must be forgotten here before it is entered again.
class PrefixIndex {
 public:
  PrefixIndex(BlockPool& pool, int32_t block_size);

  int32_t num_blocks() const { return pool_.num_blocks(); }
  int32_t block_size() const { return block_size_; }
  int64_t num_collisions() const { return num_collisions_; }

  // A number that no entry has, for a salt.
  int64_t new_serial() { return ++last_serial_; }

  // Digests of full blocks of tokens; each is over `last`, the one before it, and the ids as 32 bits.
  std::vector<Digest> hash_blocks(std::span<const uint8_t> last, std::span<const int64_t> ids) const;

  // The blocks of the first keys whose tokens are these ids, in order, up to the first that is missing or wrong.
  // Holds nothing.
  std::vector<int32_t> match(int64_t root, std::span<const BlockKey> keys, std::span<const int64_t> ids);
  // Of the blocks that follow an entry, the one that begins with the most of these ids, the oldest of equals, and how
  // many; -1 and 0: none follows. Only the newest followers are compared.
  std::pair<int32_t, int32_t> match_part(int64_t serial, std::span<const int64_t> ids) const;

  // Enters held blocks, one behind the other, after the entry `serial`. For a content that was entered before, that
  // entry stands. Stops at a block that is no block (negative), and at one whose key another content has: what follows
  // could not be told from what follows that one. Returns how many were entered and the serial number of the last one.
  std::pair<int32_t, int64_t> enter(std::span<const int32_t> blocks, std::span<const int64_t> ids,
                                    std::span<const BlockKey> keys, std::span<const Digest> digests, int64_t serial,
                                    bool is_durable);
  // Enters a block that is not full, for match_part alone.
  void enter_part(int32_t block, std::span<const int64_t> ids, BlockKey key, int64_t serial);
  // Forgets blocks; those that were not entered are left alone.
  void forget(std::span<const int32_t> blocks);

  // Blocks that follow an entry or a salt, oldest first.
  std::vector<int32_t> followers(int64_t serial) const;

  std::vector<int32_t>& tokens() { return tokens_; }       // [num_blocks, block_size], -1 behind the end of a part
  std::vector<Digest>& digests() { return digests_; }      // [num_blocks]; they stay when a block is forgotten
  std::vector<uint8_t>& is_durable() { return durable_; }  // [num_blocks]; likewise
  std::vector<int64_t>& serials() { return serials_; }     // [num_blocks]; 0: not entered
  std::vector<int64_t>& parents() { return parents_; }     // [num_blocks] serial number of what it follows

 private:
  struct Family {
    int32_t oldest, newest;
  };

  // The serial number of this content; 0 when another content has the key.
  int64_t enter_one(int32_t block, std::span<const int64_t> ids, BlockKey key, int64_t parent);
  bool has_tokens(int32_t block, std::span<const int64_t> ids) const;  // and no others
  void join(int32_t block, int64_t parent);
  void leave(int32_t block);

  BlockPool& pool_;
  int32_t block_size_;
  int64_t last_serial_ = 0, num_collisions_ = 0;
  std::vector<int32_t> tokens_;
  std::vector<Digest> digests_;
  std::vector<uint8_t> durable_;
  std::vector<int64_t> serials_, parents_;
  std::unordered_map<int64_t, Family> families_;  // by the serial number of what they follow
  std::vector<int32_t> older_, newer_;            // of the same family; -1: none
  std::vector<uint8_t> has_family_;               // false for an entry whose parent was forgotten
};

}  // namespace llmopt
