#include "llmopt/draft_trees.h"

#include <bit>

namespace llmopt {

DraftForm plant_trees(int64_t num_rows, int64_t width, const int64_t* token_ids, const int32_t* num_draft,
                      const int32_t* parents, int64_t vocab_size, uint64_t* masks, int64_t* depths) {
  DraftForm form = DraftForm::kChains;
  for (int64_t b = 0; b < num_rows; ++b) {
    const int64_t* ids = token_ids + b * width;
    for (int i = 0; i < num_draft[b]; ++i) {
      if (ids[i] < 0 || ids[i] >= vocab_size) return DraftForm::kBroken;
    }
    if (!parents) continue;
    const int32_t* followed = parents + b * width;
    for (int i = 0; i < num_draft[b]; ++i) {
      if (followed[i] == i - 1) continue;
      form = DraftForm::kTrees;
      if (followed[i] < -1 || followed[i] >= i) return DraftForm::kBroken;
    }
    for (int i = 0; i < num_draft[b]; ++i) {
      for (int j = 0; j < i; ++j) {
        if (followed[i] == followed[j] && ids[i] == ids[j]) return DraftForm::kBroken;
      }
    }
  }
  if (!parents || !masks || !depths) return form;
  for (int64_t b = 0; b < num_rows; ++b, parents += width, masks += width, depths += width) {
    for (int64_t i = 0; i < width; ++i) {
      const bool is_draft = i < num_draft[b];
      masks[i] = is_draft ? (parents[i] < 0 ? 0 : masks[parents[i]]) | uint64_t{1} << i : 0;
      depths[i] = std::popcount(masks[i]);
    }
  }
  return form;
}

}  // namespace llmopt
