// The Python extension llmopt._core. Tensors arrive as addresses and strides, because turning a tensor into an array
// object costs more than the rest of a call; the Python face in llmopt/ops knows the tensors and checks them.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/common.h"
#include "bindings/machine_probe.h"
#include "llmopt/argmax.h"
#include "llmopt/attention.h"
#include "llmopt/draft_trees.h"
#include "llmopt/isa.h"
#include "llmopt/layer_cache.h"
#include "llmopt/move_tokens.h"
#include "llmopt/parallel.h"
#include "llmopt/step_plan.h"

using nb::literals::operator""_a;

namespace llmopt {
namespace {

LayerCache make_layer_cache(uintptr_t key, uintptr_t value, int64_t num_blocks, int num_kv_heads, int block_size,
                            int head_dim, int head_dim_v, bool bfloat16, bool quantized) {
  if (num_blocks <= 0 || num_kv_heads <= 0 || block_size <= 0 || head_dim <= 0 || head_dim_v <= 0) {
    throw nb::value_error(("a cache of " + std::to_string(num_blocks) + " blocks, " + std::to_string(num_kv_heads) +
                           " heads, block size " + std::to_string(block_size) + ", head_dim " +
                           std::to_string(head_dim) + " and " + std::to_string(head_dim_v) +
                           ": every size must be positive.")
                              .c_str());
  }
  return {pointer<void>(key), pointer<void>(value),
          num_blocks,         num_kv_heads,
          block_size,         head_dim,
          head_dim_v,         bfloat16 ? DType::kBFloat16 : DType::kFloat32,
          quantized};
}

void update_plan(OwningStepPlan& self, nb::handle block_tables, nb::handle seq_lens, nb::handle cu_seqlens_q,
                 nb::handle slot_mapping, nb::handle num_drafts, nb::handle draft_masks) {
  auto tables = view<Table>(block_tables, "block_tables", "an int32 array [B, M] on the CPU");
  auto lens = view<Array1<int32_t>>(seq_lens, "seq_lens", "a contiguous int32 array [B] on the CPU");
  auto cu = view<Array1<int32_t>>(cu_seqlens_q, "cu_seqlens_q", "a contiguous int32 array [B + 1] on the CPU");
  Array1<int64_t> slots;
  StepInputs inputs;
  if (!slot_mapping.is_none()) {
    slots = view<Array1<int64_t>>(slot_mapping, "slot_mapping", "a contiguous int64 array [T] on the CPU");
    inputs.slot_mapping = {slots.data(), slots.shape(0)};
  }
  if (tables.shape(0) != lens.shape(0)) {
    throw nb::value_error(("block_tables has " + std::to_string(tables.shape(0)) + " rows, seq_lens has " +
                           std::to_string(lens.shape(0)) + " entries; there is one of each per request.")
                              .c_str());
  }
  if (tables.shape(1) > 1 && tables.stride(1) != 1) {
    throw nb::value_error(("the rows of block_tables must be contiguous, their entries are " +
                           std::to_string(tables.stride(1)) + " apart.")
                              .c_str());
  }
  inputs.block_tables = tables.data();
  inputs.block_table_stride = tables.stride(0);
  inputs.max_blocks = static_cast<int64_t>(tables.shape(1));
  inputs.seq_lens = {lens.data(), lens.shape(0)};
  inputs.cu_seqlens_q = {cu.data(), cu.shape(0)};
  Array1<int32_t> drafts;
  Array1<uint64_t> masks;
  if (!draft_masks.is_none()) {
    drafts = view<Array1<int32_t>>(num_drafts, "num_drafts", "a contiguous int32 array [B] on the CPU");
    masks = view<Array1<uint64_t>>(draft_masks, "draft_masks", "a contiguous uint64 array [T] on the CPU");
    inputs.num_drafts = {drafts.data(), drafts.shape(0)};
    inputs.draft_masks = {masks.data(), masks.shape(0)};
  }
  self.plan.update(inputs);
  self.num_drafts = std::move(drafts);
  self.draft_masks = std::move(masks);
  self.block_tables = std::move(tables);
  self.seq_lens = std::move(lens);
  self.cu_seqlens_q = std::move(cu);
  self.slot_mapping = std::move(slots);
}

void attend(OwningStepPlan& plan, const LayerCache& cache, int64_t num_tokens, int num_heads, int head_dim,
            uintptr_t query, int64_t token_stride, int64_t head_stride, uintptr_t out, float scale, int sliding_window,
            float softcap, uintptr_t sinks, int num_threads) {
  const AttentionArgs args{pointer<const void>(query),
                           token_stride,
                           head_stride,
                           num_tokens,
                           num_heads,
                           head_dim,
                           pointer<void>(out),
                           scale,
                           sliding_window,
                           softcap,
                           pointer<const float>(sinks)};
  run_unlocked_if_long(estimate_attention_ns(args, cache, plan.plan),
                       [&] { paged_attention(args, cache, plan.plan, num_threads); });
}

void write_to_cache(const OwningStepPlan& plan, const LayerCache& cache, int64_t num_tokens, int num_kv_heads,
                    int head_dim, int head_dim_v, uintptr_t key, int64_t key_token_stride, int64_t key_head_stride,
                    uintptr_t value, int64_t value_token_stride, int64_t value_head_stride, int num_threads) {
  const WriteKvArgs args{pointer<const void>(key),
                         key_token_stride,
                         key_head_stride,
                         pointer<const void>(value),
                         value_token_stride,
                         value_head_stride,
                         num_tokens,
                         num_kv_heads,
                         head_dim,
                         head_dim_v};
  run_unlocked_if_long(estimate_write_ns(args, cache), [&] { write_kv(args, cache, plan.plan, num_threads); });
}

// All tensors of a pool, so that a call brings nothing but places.
struct TokenMover {
  std::vector<TokenRows> rows;
  int64_t block_size;
};

TokenMover make_mover(const std::vector<std::tuple<uintptr_t, int64_t, int64_t, int64_t>>& tensors,
                      int64_t block_size) {
  TokenMover mover{{}, block_size};
  for (const auto& [address, num_blocks, num_heads, row_bytes] : tensors) {
    if (num_blocks < 1 || num_heads < 1 || row_bytes < 1 || block_size < 1) {
      throw nb::value_error("a tensor of the pool has no size: every number must be positive.");
    }
    mover.rows.push_back({pointer<std::byte>(address), num_blocks, num_heads, row_bytes});
  }
  return mover;
}

// With places, those rows of the num_rows alone, in their order.
std::pair<std::vector<int64_t>, std::vector<float>> argmax_rows(uintptr_t rows, int64_t num_rows, int64_t size,
                                                                int64_t row_stride, int num_threads,
                                                                const std::vector<int64_t>& places) {
  check_places(places, num_rows);
  const bool has_places = !places.empty();
  if (has_places) num_rows = static_cast<int64_t>(places.size());
  if (num_rows < 0 || size < 1) {
    throw nb::value_error(("the largest of " + std::to_string(num_rows) + " rows of " + std::to_string(size) +
                           " values: a row has at least one.")
                              .c_str());
  }
  std::vector<int64_t> indices(num_rows);
  std::vector<float> values(num_rows);
  const auto* data = pointer<const float>(rows);
  constexpr double kNsPerValue = 0.1;
  const double estimated_ns = kNsPerValue * static_cast<double>(num_rows * size);
  const auto run = [&](int thread, int team) {
    for (int64_t row = thread; row < num_rows; row += team) {
      const Best best = argmax(data + (has_places ? places[row] : row) * row_stride, size);
      indices[row] = best.index;
      values[row] = best.value;
    }
  };
  run_unlocked_if_long(estimated_ns, [&] {
    if (num_rows > 1 && estimated_ns > kMinUnlockedNs) {
      parallel_team(num_threads, run);
    } else {
      run(0, 1);
    }
  });
  return {std::move(indices), std::move(values)};
}

// Returns 0 for chains, 1 for trees, 2 for what cannot run.
int plant(nb::handle token_ids, nb::handle num_draft, nb::handle parents, int64_t vocab_size, nb::handle masks,
          nb::handle depths) {
  using Ids = nb::ndarray<const int64_t, nb::ndim<2>, nb::device::cpu, nb::c_contig>;
  using Parents = nb::ndarray<const int32_t, nb::ndim<2>, nb::device::cpu, nb::c_contig>;
  const auto ids = view<Ids>(token_ids, "token_ids", "a contiguous int64 array [B, num_draft] on the CPU");
  const auto counts = view<Array1<int32_t>>(num_draft, "num_draft", "a contiguous int32 array [B] on the CPU");
  const auto rows = static_cast<int64_t>(ids.shape(0)), width = static_cast<int64_t>(ids.shape(1));
  const auto fits = [&](const auto& array) { return array.shape(0) == ids.shape(0) && array.shape(1) == ids.shape(1); };
  bool is_right = counts.shape(0) == ids.shape(0);
  for (int64_t b = 0; is_right && b < rows; ++b) {
    is_right = counts.data()[b] >= 0 && counts.data()[b] <= std::min<int64_t>(width, kMaxDrafts);
  }
  if (!is_right) throw nb::value_error("num_draft does not fit token_ids.");
  if (parents.is_none()) {
    return static_cast<int>(plant_trees(rows, width, ids.data(), counts.data(), nullptr, vocab_size, nullptr, nullptr));
  }
  const auto followed = view<Parents>(parents, "parents", "a contiguous int32 array [B, num_draft] on the CPU");
  const auto bits = nb::cast<nb::ndarray<uint64_t, nb::ndim<2>, nb::device::cpu, nb::c_contig>>(masks);
  const auto counted = nb::cast<nb::ndarray<int64_t, nb::ndim<2>, nb::device::cpu, nb::c_contig>>(depths);
  if (!fits(followed) || !fits(bits) || !fits(counted)) {
    throw nb::value_error("parents, masks and depths must have the shape of token_ids.");
  }
  return static_cast<int>(
      plant_trees(rows, width, ids.data(), counts.data(), followed.data(), vocab_size, bits.data(), counted.data()));
}

std::vector<std::string> isa_names() {
  std::vector<std::string> names;
  for (Isa isa : available_isas()) names.push_back(name(isa));
  return names;
}

}  // namespace
}  // namespace llmopt

NB_MODULE(_core, m) {
  using namespace llmopt;

  m.def("isa", [] { return name(selected_isa()); });
  m.def("available_isas", &isa_names);
  m.def("parallel_backend", &parallel_backend);
  m.def("parallel_library", &parallel_library);

  nb::class_<LayerCache>(m, "LayerCache")
      .def("__init__", [](LayerCache* self, uintptr_t key, uintptr_t value, int64_t num_blocks, int num_kv_heads,
                          int block_size, int head_dim, int head_dim_v, bool bfloat16, bool quantized) {
        new (self) LayerCache(make_layer_cache(key, value, num_blocks, num_kv_heads, block_size, head_dim, head_dim_v,
                                               bfloat16, quantized));
      });

  nb::class_<OwningStepPlan>(m, "StepPlan")
      .def(nb::init<>())
      .def("update", &update_plan, "block_tables"_a, "seq_lens"_a, "cu_seqlens_q"_a, "slot_mapping"_a = nb::none(),
           "num_drafts"_a = nb::none(), "draft_masks"_a = nb::none());

  nb::class_<TokenMover>(m, "TokenMover")
      .def("__init__",
           [](TokenMover* self, const std::vector<std::tuple<uintptr_t, int64_t, int64_t, int64_t>>& tensors,
              int64_t block_size) { new (self) TokenMover(make_mover(tensors, block_size)); })
      .def("move",
           [](const TokenMover& self, const std::vector<int64_t>& sources, const std::vector<int64_t>& targets) {
             move_tokens(self.rows, self.block_size, sources, targets);
           });

  bind_block_pool(m);
  bind_decoder(m);
  bind_gguf(m);

  m.def("argmax_rows", &argmax_rows, "rows"_a, "num_rows"_a, "size"_a, "row_stride"_a, "num_threads"_a,
        "places"_a = std::vector<int64_t>{});
  m.def("plant_trees", &plant, "token_ids"_a, "num_draft"_a, "parents"_a.none(), "vocab_size"_a, "masks"_a.none(),
        "depths"_a.none());
  m.def("paged_attention", &attend);
  m.def("write_kv", &write_to_cache);
  bind_fused(m);
  bind_machine_probe(m);
  bind_pack_drafts(m);
  bind_prefix_index(m);
  bind_sample(m);
  bind_suffix_automaton(m);
  bind_tree_search(m);
}
