// A batch of decodes packed again with drafts at the end of its rows.
#pragma once

#include <cstdint>

#include "llmopt/draft_trees.h"

namespace llmopt {

// Requests that decode: a token each.
struct DecodeRows {
  int64_t num_rows;
  const int64_t* token_ids;
  const int64_t* positions;
  const int32_t* seq_lens;
  const int32_t* block_tables;  // row b begins at b * table_stride
  int64_t table_stride;
  int64_t table_width;  // 0: nothing is stored, and slots are -1
  int64_t block_size;
};

// As in `plant_trees`.
struct DraftRows {
  const int64_t* token_ids;
  const int32_t* num_draft;
  const int32_t* parents;
  int64_t width;
};

// Rows one behind the other, without pads. Arrays of tokens hold num_rows + the sum of num_draft entries.
struct PackedRows {
  int64_t* token_ids;
  int64_t* positions;
  int64_t* slot_mapping;
  uint64_t* draft_masks;  // filled for kTrees only
  int32_t* num_scheduled;
  int32_t* seq_lens;
  int32_t* cu_seqlens_q;  // num_rows + 1 entries
};

// Fills `packed` with each row's token and its drafts. For kBroken nothing is filled.
DraftForm pack_drafts(const DecodeRows& rows, const DraftRows& drafts, int64_t vocab_size, const PackedRows& packed);

}  // namespace llmopt
