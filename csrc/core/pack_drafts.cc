#include "llmopt/pack_drafts.h"

#include <algorithm>
#include <bit>

namespace llmopt {

DraftForm pack_drafts(const DecodeRows& rows, const DraftRows& drafts, int64_t vocab_size, const PackedRows& packed) {
  const DraftForm form = plant_trees(rows.num_rows, drafts.width, drafts.token_ids, drafts.num_draft, drafts.parents,
                                     vocab_size, nullptr, nullptr);
  if (form == DraftForm::kBroken) return form;
  const bool has_trees = form == DraftForm::kTrees;
  int64_t end = 0;
  packed.cu_seqlens_q[0] = 0;
  for (int64_t b = 0; b < rows.num_rows; ++b) {
    const int64_t first = end, newest = rows.positions[b];
    const int32_t count = drafts.num_draft[b];
    const int32_t* table = rows.block_tables + b * rows.table_stride;
    end += 1 + count;
    for (int64_t i = 0; i <= count; ++i) {
      const int64_t place = newest + i;
      packed.token_ids[first + i] = i ? drafts.token_ids[b * drafts.width + i - 1] : rows.token_ids[b];
      packed.positions[first + i] = place;
      packed.slot_mapping[first + i] = -1;
      if (rows.table_width) {
        const int64_t block = std::min(place / rows.block_size, rows.table_width - 1);
        packed.slot_mapping[first + i] = int64_t{table[block]} * rows.block_size + place % rows.block_size;
      }
    }
    if (has_trees) {
      const int32_t* parents = drafts.parents + b * drafts.width;
      uint64_t* masks = packed.draft_masks + first + 1;  // of the drafts
      masks[-1] = 0;
      for (int64_t i = 0; i < count; ++i) {
        masks[i] = (parents[i] < 0 ? 0 : masks[parents[i]]) | uint64_t{1} << i;
        packed.positions[first + 1 + i] = newest + std::popcount(masks[i]);
      }
    }
    packed.num_scheduled[b] = 1 + count;
    packed.seq_lens[b] = rows.seq_lens[b] + count;
    packed.cu_seqlens_q[b + 1] = static_cast<int32_t>(end);
  }
  return form;
}

}  // namespace llmopt
