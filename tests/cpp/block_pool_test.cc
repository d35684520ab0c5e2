#include "llmopt/block_pool.h"

#include <gtest/gtest.h>

#include <random>
#include <stdexcept>
#include <vector>

namespace llmopt {
namespace {

TEST(BlockPool, StaysWholeUnderRandomCalls) {
  std::mt19937 random(1);
  BlockPool pool(24);
  std::vector<std::vector<int32_t>> holders;
  for (int step = 0; step < 100000; ++step) {
    const int action = static_cast<int>(random() % 6);
    if (action == 0) {
      const int32_t count = static_cast<int32_t>(random() % 6);
      const int32_t missing = count - pool.num_unused();
      if (missing > pool.num_kept()) continue;
      if (missing > 0) {
        EXPECT_EQ(pool.evict(missing).first.size(), static_cast<size_t>(missing));
      }
      holders.push_back(pool.allocate(count));
    } else if (!holders.empty()) {
      auto& held = holders[random() % holders.size()];
      const BlockKey key{random() % 40, 0};
      if (action == 1) {
        pool.free(held);
        std::swap(held, holders.back());
        holders.pop_back();
      } else if (action == 2) {
        const std::vector<int32_t> again = held;
        pool.share(again);
        holders.push_back(again);
      } else if (action == 3 && !held.empty() && !pool.has_key(held[0])) {
        const bool is_new = pool.find(key) < 0;
        EXPECT_EQ(pool.set_key(held[0], key), is_new);
      } else if (action == 4 && pool.find(key) >= 0) {
        const std::vector<int32_t> found{pool.find(key)};
        pool.share(found);
        holders.push_back(found);
      } else if (action == 5) {
        pool.drop_key(static_cast<int32_t>(random() % 24));
      }
    }
    ASSERT_EQ(pool.error(), "") << "after step " << step;
  }
  for (const auto& held : holders) pool.free(held);
  EXPECT_EQ(pool.num_unused() + pool.num_kept(), 24);
  EXPECT_EQ(pool.error(), "");
}

TEST(BlockPool, RefusesWhatItsStateDoesNotAllow) {
  BlockPool pool(2);
  EXPECT_THROW(pool.allocate(3), std::logic_error);
  EXPECT_THROW(pool.evict(1), std::logic_error);
  const std::vector<int32_t> blocks = pool.allocate(1);
  pool.free(blocks);
  EXPECT_THROW(pool.free(blocks), std::logic_error);
  EXPECT_THROW(pool.share(blocks), std::logic_error);
  EXPECT_THROW(pool.set_key(blocks[0], {1, 2}), std::logic_error);
  EXPECT_THROW(pool.share(std::vector<int32_t>{5}), std::out_of_range);
}

}  // namespace
}  // namespace llmopt
