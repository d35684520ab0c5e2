#include "llmopt/argmax.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

namespace llmopt {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

TEST(Argmax, FindsTheFirstOfTheLargestForEverySize) {
  std::mt19937 random(0);
  for (int size = 1; size < 300; ++size) {
    std::vector<float> row(size);
    for (float& x : row) x = static_cast<float>(static_cast<int>(random() % 40) - 20);  // ties are common
    const auto expected = std::max_element(row.begin(), row.end());
    const Best best = argmax(row.data(), size);
    EXPECT_EQ(best.index, expected - row.begin());
    EXPECT_EQ(best.value, *expected);
  }
}

TEST(Argmax, ShowsTheFirstNanWhereverItStands) {
  for (int place : {0, 1, 63, 64, 130, 199}) {
    std::vector<float> row(200, 3.0f);
    row[place] = kNan;
    row[199] = kNan;
    const Best best = argmax(row.data(), 200);
    EXPECT_EQ(best.index, place);
    EXPECT_TRUE(std::isnan(best.value));
  }
}

TEST(Argmax, TakesInfinitiesAsValues) {
  std::vector<float> row(100, -kInf);
  EXPECT_EQ(argmax(row.data(), 100).index, 0);
  EXPECT_EQ(argmax(row.data(), 100).value, -kInf);
  row[77] = kInf;
  EXPECT_EQ(argmax(row.data(), 100).index, 77);
  EXPECT_EQ(argmax(row.data(), 100).value, kInf);
}

}  // namespace
}  // namespace llmopt
