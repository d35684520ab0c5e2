// Drafts as drafters give them, turned into the masks that attention reads.
#pragma once

#include <cstdint>

namespace llmopt {

enum class DraftForm {
  kChains,  // every draft follows the one before it
  kTrees,
  kBroken,  // an id outside of the vocabulary, a parent that does not come before its draft, or twins
};

// Row b has num_draft[b] drafts, at most `width` and kMaxDrafts; its arrays have `width` entries. parents[i]: what
// draft i follows, -1 the request's newest token, else an earlier draft. Null: chains.
// Bit j of masks[i]: draft j is on the path to draft i, itself included. depths[i]: how many there are. Entries behind
// num_draft[b] become 0. Both may be null; they are not filled for kBroken, nor for kChains where `parents` is null.
// Drafts that follow the same token must differ.
DraftForm plant_trees(int64_t num_rows, int64_t width, const int64_t* token_ids, const int32_t* num_draft,
                      const int32_t* parents, int64_t vocab_size, uint64_t* masks, int64_t* depths);

}  // namespace llmopt
