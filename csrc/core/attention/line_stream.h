// The keys and values that a thread needs next, fetched to the second-level cache while it computes.
#pragma once

#include "core/attention/kernels.h"
#include "core/attention/key_chunk.h"
#include "core/attention/simd.h"

namespace llmopt::attention {
namespace {

constexpr int kStreamKeys = 256;  // keys that are fetched ahead

using StreamChunk = KeyChunk<kStreamKeys>;

// Of a short chunk only the first line of each group is fetched: all of them would hold up the loads of the chunk at
// hand for longer than they save.
constexpr int kLongChunk = 128;

// What is to be fetched while a chunk is computed, a few cache lines at a time.
class LineStream {
 public:
  void add(const StreamChunk& chunk, const Task& task) {
    const int groups = (chunk.end + 15) / 16;
    const bool is_long = chunk.end >= kLongChunk;
    for (int i = 0; i < groups; ++i) add(chunk.keys[i], is_long ? (16 * task.key_row_bytes + 63) / 64 : 1);
    for (int i = 0; i < groups; ++i) add(chunk.values[i], is_long ? (16 * task.value_row_bytes + 63) / 64 : 1);
  }

  // What follows in the task from key `first` on, or else what the next task starts with.
  void add_following(const Task& task, int first) {
    const Task* of = &task;
    int key_begin = task.key_begin;
    if (first >= task.key_end) {
      if (!task.next) return;
      of = task.next;
      key_begin = of->key_begin;
      first = key_begin / 16 * 16;
    }
    StreamChunk chunk;
    chunk.locate(*of, first, key_begin, of->key_end);
    add(chunk, *of);
  }

  // Divide what there is among `num_steps` calls of fetch().
  void pace(int num_steps) { lines_per_step_ = (num_lines_ + num_steps - 1) / num_steps; }

  LLMOPT_INLINE void fetch() {
    for (int left = lines_per_step_; left > 0 && next_ < num_pieces_;) {
      Piece& piece = pieces_[next_];
      const int count = min(left, piece.num_lines);
      for (int i = 0; i < count; ++i) __builtin_prefetch(piece.from + 32 * i, 0, 2);
      left -= count;
      piece.from += 32 * count;
      piece.num_lines -= count;
      next_ += piece.num_lines == 0;
    }
  }

 private:
  struct Piece {
    const uint16_t* from;
    int num_lines;
  };
  void add(const uint16_t* from, int num_lines) {
    pieces_[num_pieces_++] = {from, num_lines};
    num_lines_ += num_lines;
  }

  Piece pieces_[2 * kStreamKeys / 16];
  int num_pieces_ = 0, next_ = 0, num_lines_ = 0, lines_per_step_ = 0;
};

}  // namespace
}  // namespace llmopt::attention
