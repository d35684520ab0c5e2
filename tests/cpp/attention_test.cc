// Against a plain loop in double, with the instruction set that LLMOPT_ISA names. Every buffer has exactly the size it
// must have, so that the address sanitizer sees a read or write past it.
#include "llmopt/attention.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <iostream>
#include <limits>
#include <memory>
#include <numeric>
#include <random>
#include <stdexcept>
#include <vector>

#include "core/attention/kernels.h"
#include "llmopt/isa.h"
#include "llmopt/linear.h"
#include "llmopt/thread_team.h"

namespace llmopt {
namespace {

struct Sizes {
  std::vector<int> q_lens, kv_lens;
  int num_kv_heads = 2, group = 3, head_dim = 64, head_dim_v = 64, block_size = 16;
  int window = 0;
  float softcap = 0;
  bool sinks = false;
  std::vector<int> num_drafts = {};  // of each request: random trees; empty: none
};

uint16_t to_bfloat16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
float from_bfloat16(uint16_t x) {
  const uint32_t bits = static_cast<uint32_t>(x) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

// Values of a dtype in memory of exactly their size.
class Buffer {
 public:
  Buffer(DType dtype, size_t count, float value)
      : dtype_(dtype), count_(count), bytes_(new char[count * item_size(dtype)]) {
    for (size_t i = 0; i < count; ++i) set(i, value);
  }
  void* data() { return bytes_.get(); }
  float get(size_t i) const {
    if (i >= count_) throw std::out_of_range("buffer");
    if (dtype_ == DType::kBFloat16) return from_bfloat16(load<uint16_t>(i));
    return load<float>(i);
  }
  void set(size_t i, float value) {
    if (i >= count_) throw std::out_of_range("buffer");
    const uint16_t half = to_bfloat16(value);
    const void* from = dtype_ == DType::kBFloat16 ? static_cast<const void*>(&half) : &value;
    std::memcpy(bytes_.get() + i * item_size(dtype_), from, item_size(dtype_));
  }

 private:
  template <class T>
  T load(size_t i) const {
    T value;
    std::memcpy(&value, bytes_.get() + i * sizeof(T), sizeof(T));
    return value;
  }
  DType dtype_;
  size_t count_;
  std::unique_ptr<char[]> bytes_;
};

// How a cache stores its rows.
struct Rows {
  DType dtype;  // of queries and outputs too
  bool is_quantized = false;
};

// One random step. Places nobody may look at hold NaN, block ids nobody may follow are -1.
struct Problem {
  Sizes sizes;
  DType dtype;
  int num_heads, num_tokens, num_blocks = 0, max_blocks = 0;
  std::vector<int32_t> block_tables, seq_lens, cu_seqlens_q{0};
  std::vector<uint64_t> draft_masks;  // [num_tokens], empty without drafts
  std::vector<float> sinks;
  std::unique_ptr<Buffer> key_cache, value_cache, query, out;
  std::unique_ptr<Buffer> rotated_query;         // as it meets the keys of a quantized cache
  std::unique_ptr<char[]> key_rows, value_rows;  // the caches in 8 bits; null: they are not quantized
  float scale;

  Problem(const Sizes& s, Rows stored, unsigned seed)
      : sizes(s), dtype(stored.dtype), num_heads(s.num_kv_heads * s.group) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
    seq_lens.assign(s.kv_lens.begin(), s.kv_lens.end());
    for (size_t b = 0; b < s.q_lens.size(); ++b) {
      const int blocks = (s.kv_lens[b] + s.block_size - 1) / s.block_size;
      max_blocks = std::max(max_blocks, blocks);
      num_blocks += blocks;
      cu_seqlens_q.push_back(cu_seqlens_q.back() + s.q_lens[b]);
    }
    num_blocks = std::max(1, num_blocks);
    num_tokens = cu_seqlens_q.back();
    if (!s.num_drafts.empty()) draft_masks.assign(num_tokens, 0);
    for (size_t b = 0; b < s.num_drafts.size(); ++b) {
      uint64_t* masks = draft_masks.data() + cu_seqlens_q[b + 1] - s.num_drafts[b];
      for (int i = 0; i < s.num_drafts[b]; ++i) {
        const int parent = static_cast<int>(random() % (i + 1)) - 1;
        masks[i] = (parent < 0 ? 0 : masks[parent]) | uint64_t{1} << i;
      }
    }
    scale = 1 / std::sqrt(static_cast<float>(s.head_dim));
    const size_t rows = static_cast<size_t>(num_blocks) * s.num_kv_heads * s.block_size;
    key_cache = std::make_unique<Buffer>(dtype, rows * s.head_dim, kNan);
    value_cache = std::make_unique<Buffer>(dtype, rows * s.head_dim_v, kNan);
    query = std::make_unique<Buffer>(dtype, static_cast<size_t>(num_heads) * num_tokens * s.head_dim, 0);
    out = std::make_unique<Buffer>(dtype, static_cast<size_t>(num_heads) * num_tokens * s.head_dim_v, kNan);
    for (size_t i = 0; i < static_cast<size_t>(num_heads) * num_tokens * s.head_dim; ++i) query->set(i, normal(random));
    std::vector<int32_t> free(num_blocks);
    std::iota(free.begin(), free.end(), 0);
    std::shuffle(free.begin(), free.end(), random);
    block_tables.assign(s.q_lens.size() * max_blocks, -1);
    for (size_t b = 0; b < s.q_lens.size(); ++b) {
      const int first = s.window ? std::max(0, s.kv_lens[b] - s.q_lens[b] - s.window + 1) : 0;
      for (int position = first; position < s.kv_lens[b]; ++position) {
        int32_t& block = block_tables[b * max_blocks + position / s.block_size];
        if (block < 0) {
          block = free.back();
          free.pop_back();
        }
        for (int head = 0; head < s.num_kv_heads; ++head) {
          const size_t row = cache_row(b, head, position);
          for (int d = 0; d < s.head_dim; ++d) key_cache->set(row * s.head_dim + d, normal(random));
          for (int d = 0; d < s.head_dim_v; ++d) value_cache->set(row * s.head_dim_v + d, normal(random));
        }
      }
    }
    if (stored.is_quantized) {
      rotated_query = std::make_unique<Buffer>(dtype, static_cast<size_t>(num_heads) * num_tokens * s.head_dim, 0);
      for (int row = 0; row < num_heads * num_tokens; ++row) rotate(*query, row, s.head_dim, *rotated_query);
      for (size_t row = 0; row < rows; ++row) rotate(*key_cache, row, s.head_dim, *key_cache);
      key_rows = quantize(*key_cache, rows, s.head_dim);
      value_rows = quantize(*value_cache, rows, s.head_dim_v);
    }
    if (s.sinks) {
      for (int h = 0; h < num_heads; ++h) sinks.push_back(normal(random));
    }
  }

  static void rotate(const Buffer& from, size_t row, int dim, Buffer& to) {
    std::vector<float> values(dim);
    for (int d = 0; d < dim; ++d) values[d] = from.get(row * dim + d);
    attention::kernels(selected_isa()).rotate_row_f32(values.data(), dim, values.data());
    for (int d = 0; d < dim; ++d) to.set(row * dim + d, values[d]);
  }

  // Rows in 8 bits, in memory of exactly their size; the buffer then holds what they stand for.
  static std::unique_ptr<char[]> quantize(Buffer& buffer, size_t rows, int dim) {
    const int row_bytes = dim + kScaleBytes;
    std::unique_ptr<char[]> bytes(new char[rows * row_bytes]);
    for (size_t row = 0; row < rows; ++row) {
      float largest = 0;
      for (int d = 0; d < dim; ++d) largest = std::max(largest, std::abs(buffer.get(row * dim + d)));
      const bool is_nan = std::isnan(buffer.get(row * dim));
      uint16_t scale_bits = to_bfloat16(largest / 127);
      if (from_bfloat16(scale_bits) < largest / 127) ++scale_bits;
      if (is_nan) scale_bits = 0x7fc0;
      const float scale = from_bfloat16(scale_bits);
      char* to = bytes.get() + row * row_bytes;
      for (int d = 0; d < dim; ++d) {
        const float x = buffer.get(row * dim + d);
        to[d] = static_cast<char>(is_nan ? 0 : std::nearbyint(x / scale));
        buffer.set(row * dim + d, static_cast<signed char>(to[d]) * scale);
      }
      std::memcpy(to + dim, &scale_bits, kScaleBytes);
    }
    return bytes;
  }

  size_t cache_row(size_t b, int head, int position) const {
    const size_t block = block_tables[b * max_blocks + position / sizes.block_size];
    return (block * sizes.num_kv_heads + head) * sizes.block_size + position % sizes.block_size;
  }

  LayerCache cache() {
    return {key_rows ? key_rows.get() : key_cache->data(),
            value_rows ? value_rows.get() : value_cache->data(),
            num_blocks,
            sizes.num_kv_heads,
            sizes.block_size,
            sizes.head_dim,
            sizes.head_dim_v,
            dtype,
            key_rows != nullptr};
  }

  StepInputs inputs() const {
    StepInputs inputs;
    inputs.block_tables = block_tables.data();
    inputs.block_table_stride = inputs.max_blocks = max_blocks;
    inputs.seq_lens = seq_lens;
    inputs.cu_seqlens_q = cu_seqlens_q;
    inputs.draft_masks = draft_masks;
    inputs.num_drafts = sizes.num_drafts;
    return inputs;
  }

  uint64_t mask_of(size_t b, int place) const {
    const int q = place - (sizes.kv_lens[b] - sizes.q_lens[b]);
    return draft_masks.empty() || q < 0 ? 0 : draft_masks[cu_seqlens_q[b] + q];
  }
  int first_draft(size_t b) const { return sizes.kv_lens[b] - (sizes.num_drafts.empty() ? 0 : sizes.num_drafts[b]); }
  // Where the token in this place of the cache stands in its sequence.
  int position_of(size_t b, int place) const {
    const uint64_t mask = mask_of(b, place);
    return mask ? first_draft(b) - 1 + __builtin_popcountll(mask) : place;
  }
  bool sees(size_t b, int place, int key) const {
    if (key > place) return false;
    if (sizes.window && position_of(b, key) <= position_of(b, place) - sizes.window) return false;
    return key < first_draft(b) || (mask_of(b, place) >> (key - first_draft(b)) & 1);
  }

  // The query lies head by head, as transposed views do.
  AttentionArgs args() {
    return {query->data(),
            sizes.head_dim,
            static_cast<int64_t>(num_tokens) * sizes.head_dim,
            num_tokens,
            num_heads,
            sizes.head_dim,
            out->data(),
            scale,
            sizes.window,
            sizes.softcap,
            sizes.sinks ? sinks.data() : nullptr};
  }

  std::vector<double> expected(size_t b, int q, int h) const {
    const Sizes& s = sizes;
    const int place = s.kv_lens[b] - s.q_lens[b] + q;
    std::vector<int> keys;
    for (int k = 0; k <= place; ++k) {
      if (sees(b, place, k)) keys.push_back(k);
    }
    const size_t token = cu_seqlens_q[b] + q;
    std::vector<double> scores, sum(s.head_dim_v);
    double top = s.sinks ? sinks[h] : -std::numeric_limits<double>::infinity();
    for (const int k : keys) {
      double score = 0;
      for (int d = 0; d < s.head_dim; ++d) {
        const Buffer& q_rows = rotated_query ? *rotated_query : *query;
        score += static_cast<double>(q_rows.get((static_cast<size_t>(h) * num_tokens + token) * s.head_dim + d)) *
                 key_cache->get(cache_row(b, h / s.group, k) * s.head_dim + d);
      }
      score *= scale;
      if (s.softcap > 0) score = std::tanh(score / s.softcap) * s.softcap;
      scores.push_back(score);
      top = std::max(top, score);
    }
    double denominator = s.sinks ? std::exp(sinks[h] - top) : 0;
    for (double score : scores) denominator += std::exp(score - top);
    for (size_t i = 0; i < scores.size(); ++i) {
      const double p = std::exp(scores[i] - top) / denominator;
      const size_t row = cache_row(b, h / s.group, keys[i]);
      for (int d = 0; d < s.head_dim_v; ++d) sum[d] += p * value_cache->get(row * s.head_dim_v + d);
    }
    return sum;
  }

  void run_and_compare() {
    StepPlan plan;
    plan.update(inputs());
    paged_attention(args(), cache(), plan, 2);
    // bfloat16: probabilities and outputs keep 8 bits.
    const double tolerance = dtype == DType::kFloat32 ? 1e-5 : 1.6e-2;
    for (size_t b = 0; b < sizes.q_lens.size(); ++b) {
      for (int q = 0; q < sizes.q_lens[b]; ++q) {
        for (int h = 0; h < num_heads; ++h) {
          const auto want = expected(b, q, h);
          const size_t row = (static_cast<size_t>(cu_seqlens_q[b] + q) * num_heads + h) * sizes.head_dim_v;
          for (int d = 0; d < sizes.head_dim_v; ++d) {
            const double got = out->get(row + d);
            ASSERT_FALSE(std::isnan(got)) << "request " << b << " query " << q << " head " << h << " column " << d;
            ASSERT_NEAR(got, want[d], tolerance * (1 + std::abs(want[d])))
                << "request " << b << " query " << q << " head " << h << " column " << d;
          }
        }
      }
    }
  }
};

class Attention : public ::testing::TestWithParam<Rows> {};

TEST_P(Attention, RaggedBatchesOfAnyHeadSize) {
  unsigned seed = 0;
  for (auto [d, dv] : std::vector<std::pair<int, int>>{
           {64, 64}, {80, 80}, {8, 8}, {5, 3}, {1, 1}, {33, 40}, {128, 96}, {32, 64}, {96, 32}}) {
    for (int block_size : {1, 5, 16}) {
      Sizes s{{1, 3, 20, 1, 65}, {1, 3, 37, 140, 65}};
      s.head_dim = d;
      s.head_dim_v = dv;
      s.block_size = block_size;
      Problem(s, GetParam(), ++seed).run_and_compare();
    }
  }
}

TEST_P(Attention, AnyGroupSize) {
  for (int group : {1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 20, 40}) {
    Sizes s{{1, 2, 30}, {50, 9, 31}};
    s.group = group;
    s.head_dim = 48;
    Problem(s, GetParam(), group).run_and_compare();
  }
}

TEST_P(Attention, WindowSoftcapAndSinks) {
  for (int window : {0, 1, 7, 40, 1000}) {
    for (float softcap : {0.0f, 3.0f}) {
      for (bool sinks : {false, true}) {
        Sizes s{{1, 1, 3, 50}, {30, 200, 100, 130}};
        s.window = window;
        s.softcap = softcap;
        s.sinks = sinks;
        Problem(s, GetParam(), window).run_and_compare();
      }
    }
  }
}

TEST_P(Attention, ScaleZeroIsTheMeanOfTheVisibleValues) {
  Sizes s{{1, 30, 40}, {50, 31, 300}};
  s.window = 20;
  Problem problem(s, GetParam(), 1);
  problem.scale = 0;
  problem.run_and_compare();
}

TEST_P(Attention, LongContextsInParts) { Problem({{1, 20, 2}, {1600, 2600, 1025}}, GetParam(), 1).run_and_compare(); }

// Rows: a few more than the kernels for few rows take, with full and with half-full last groups.
TEST_P(Attention, SmallChunksOfLongPrompts) {
  for (int window : {0, 300}) {
    Sizes s{{6, 11, 16, 17, 32, 64, 86, 1}, {700, 1300, 515, 257, 1900, 256, 900, 600}};
    s.window = window;
    Problem(s, GetParam(), window).run_and_compare();
  }
}

// Few rows and many, drafts across the ends of tiles and of parts, behind a chunk of a prompt, and rows without any.
TEST_P(Attention, DraftsOfATreeSeeTheContextAndTheirPathAlone) {
  unsigned seed = 0;
  for (int group : {1, 3}) {
    for (int window : {0, 1, 4, 40}) {
      Sizes s{{2, 3, 5, 17, 17, 65, 1, 30, 17, 12}, {2, 40, 17, 140, 530, 1060, 90, 30, 17, 530}};
      s.num_drafts = {1, 2, 4, 16, 16, 64, 0, 9, 16, 0};
      s.group = group;
      s.window = window;
      s.softcap = window == 40 ? 3 : 0;
      s.head_dim = s.head_dim_v = 32;
      Problem(s, GetParam(), ++seed).run_and_compare();
    }
  }
}

TEST_P(Attention, DraftsOfATreeWithOddSizesAndSinks) {
  unsigned seed = 0;
  for (auto [d, dv] : std::vector<std::pair<int, int>>{{5, 3}, {80, 80}, {128, 96}}) {
    for (int block_size : {1, 5, 32}) {
      Sizes s{{6, 9, 33, 64}, {9, 260, 40, 300}};
      s.num_drafts = {5, 8, 30, 63};
      s.head_dim = d;
      s.head_dim_v = dv;
      s.block_size = block_size;
      s.sinks = true;
      s.window = block_size == 5 ? 6 : 0;
      Problem(s, GetParam(), ++seed).run_and_compare();
    }
  }
}

TEST_P(Attention, ChainsSaidAsTreesAreChains) {
  Sizes s{{5, 17, 40, 1}, {60, 300, 1050, 9}};
  Problem chains(s, GetParam(), 1);
  chains.run_and_compare();
  s.num_drafts = {4, 16, 39, 0};
  Problem trees(s, GetParam(), 1);
  for (size_t b = 0; b < s.q_lens.size(); ++b) {
    for (int i = 0; i < s.num_drafts[b]; ++i) {
      trees.draft_masks[trees.cu_seqlens_q[b + 1] - s.num_drafts[b] + i] = (uint64_t{2} << i) - 1;
    }
  }
  trees.run_and_compare();
}

TEST_P(Attention, ScaleZeroIsTheMeanOfThePathToo) {
  Sizes s{{5, 17, 40}, {60, 300, 1050}};
  s.num_drafts = {4, 16, 39};
  Problem problem(s, GetParam(), 1);
  problem.scale = 0;
  problem.run_and_compare();
}

TEST_P(Attention, RowsBeforeTheFirstKeyGiveZeros) {
  for (bool sinks : {false, true}) {
    Sizes s{{3, 30, 1}, {1, 2, 0}};
    s.sinks = sinks;
    Problem(s, GetParam(), 1).run_and_compare();
  }
}

TEST_P(Attention, SizesThatDifferFromTheCacheAreRefused) {
  Problem problem({{1}, {5}}, GetParam(), 1);
  StepPlan plan;
  plan.update(problem.inputs());
  AttentionArgs args = problem.args();
  args.head_dim -= 1;
  EXPECT_THROW(paged_attention(args, problem.cache(), plan, 1), std::invalid_argument);
  args = problem.args();
  args.num_heads += 1;
  EXPECT_THROW(paged_attention(args, problem.cache(), plan, 1), std::invalid_argument);
  args = problem.args();
  args.num_tokens = 0;
  EXPECT_THROW(paged_attention(args, problem.cache(), plan, 1), std::invalid_argument);
}

// Prompts of several tiles, a chunk, drafts and decodes with contexts that are split.
TEST_P(Attention, InsideATeamTheResultIsTheSameBitForBitWhateverTheNumberOfThreads) {
  Sizes s{{1, 300, 1, 4, 60}, {3000, 300, 17, 2100, 1500}};
  s.sinks = true;
  Problem problem(s, GetParam(), 3);
  problem.run_and_compare();
  const size_t num_bytes =
      static_cast<size_t>(problem.num_tokens) * problem.num_heads * s.head_dim_v * item_size(GetParam().dtype);
  const std::vector<char> want(static_cast<char*>(problem.out->data()),
                               static_cast<char*>(problem.out->data()) + num_bytes);
  StepPlan plan;
  plan.update(problem.inputs());
  for (int num_threads : {1, 2, 3, 5}) {
    ThreadTeamOptions options;
    options.num_threads = num_threads;
    ThreadTeam team(options);
    for (int layer = 0; layer < 3; ++layer) {
      std::memset(problem.out->data(), 0xff, num_bytes);
      AttentionArgs args = problem.args();
      if (problem.rotated_query) args.query = problem.rotated_query->data();
      AttentionCall call(args, problem.cache(), plan);
      team.run([&](int, int) {
        TileScope tiles;
        call.run();
      });
      ASSERT_EQ(std::memcmp(problem.out->data(), want.data(), num_bytes), 0) << num_threads << " threads";
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Rows, Attention,
                         ::testing::Values(Rows{DType::kFloat32}, Rows{DType::kBFloat16}, Rows{DType::kFloat32, true},
                                           Rows{DType::kBFloat16, true}),
                         [](const auto& info) {
                           return std::string(name(info.param.dtype)) + (info.param.is_quantized ? "_int8" : "");
                         });

}  // namespace
}  // namespace llmopt

int main(int argc, char** argv) {
  const char* requested = std::getenv("LLMOPT_ISA");
  if (requested) {
    try {
      llmopt::select_isa(requested);
    } catch (const std::runtime_error& error) {
      std::cout << "this machine has no " << requested << "\n";
      return 0;
    }
  }
  ::testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
