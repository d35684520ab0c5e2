#include "llmopt/parallel.h"

#include <gtest/gtest.h>

#include <atomic>
#include <string>
#include <vector>

namespace llmopt {
namespace {

TEST(Parallel, WithoutOpenMpInTheProcessTheOwnPoolServes) {
  EXPECT_STREQ(parallel_backend(), "own");
  EXPECT_STREQ(parallel_library(), "");
}

TEST(Parallel, EachThreadRunsTheBodyOnce) {
  for (int num_threads : {1, 2, 3, 7, 2, 1}) {
    std::vector<std::atomic<int>> runs(num_threads);
    std::atomic<int> team{0};
    parallel_team(num_threads, [&](int thread, int size) {
      ++runs[thread];
      team = size;
    });
    EXPECT_EQ(team, num_threads);
    for (auto& count : runs) EXPECT_EQ(count, 1);
  }
}

TEST(Parallel, WritesOfAllThreadsAreVisibleAfterwards) {
  std::vector<int> values(1000);
  for (int round = 1; round <= 200; ++round) {
    parallel_team(4, [&](int thread, int team) {
      for (size_t i = thread; i < values.size(); i += team) values[i] = round;
    });
    for (int value : values) ASSERT_EQ(value, round);
  }
}

TEST(Parallel, InsideARegionTheBodyRunsOnTheCallerAlone) {
  std::atomic<int> inner{0};
  parallel_team(3, [&](int, int) {
    parallel_team(3, [&](int thread, int team) {
      EXPECT_EQ(thread, 0);
      EXPECT_EQ(team, 1);
      ++inner;
    });
  });
  EXPECT_EQ(inner, 3);
}

}  // namespace
}  // namespace llmopt
