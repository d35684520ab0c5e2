// The binding of llmopt/tree_search.h. One call per round of drafting, on lists: they are short.
#include "llmopt/tree_search.h"

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <tuple>
#include <utility>
#include <vector>

#include "bindings/common.h"
#include "llmopt/decoder.h"

using nb::literals::operator""_a;

namespace llmopt {
namespace {

using Nodes = std::tuple<std::vector<int64_t>, std::vector<int64_t>, std::vector<float>>;

std::vector<Nodes> run(TreeSearch& self, std::vector<std::vector<int32_t>> block_tables, std::vector<int64_t> num_pairs,
                       std::vector<int64_t> lengths, std::vector<int64_t> token_ids, std::vector<int64_t> positions,
                       std::vector<const FeatureRows*> features, int block_size, int width, int depth,
                       std::vector<int64_t> counts, double least_gain, double least_chance) {
  TreeSearchInputs inputs{std::move(block_tables),
                          std::move(num_pairs),
                          std::move(lengths),
                          std::move(token_ids),
                          std::move(positions),
                          std::move(features),
                          block_size,
                          width,
                          depth,
                          std::move(counts),
                          least_gain,
                          least_chance};
  std::vector<DraftTreeNodes> found;
  {
    const nb::gil_scoped_release unlocked;
    found = self.run(inputs);
  }
  std::vector<Nodes> nodes;
  nodes.reserve(found.size());
  for (DraftTreeNodes& tree : found) {
    nodes.emplace_back(std::move(tree.token_ids), std::move(tree.parents), std::move(tree.scores));
  }
  return nodes;
}

}  // namespace

void bind_tree_search(nb::module_& m) {
  nb::class_<FeatureRows>(m, "FeatureRows")
      .def(
          "__init__",
          [](FeatureRows* self, uintptr_t hidden, int64_t num_tokens, int64_t num_layers, int64_t size,
             const std::vector<int64_t>& rows, const std::vector<int64_t>& taps) {
            new (self) FeatureRows(pointer<const float>(hidden), num_tokens, num_layers, size, rows, taps);
          },
          "hidden_address"_a, "num_tokens"_a, "num_layers"_a, "size"_a, "rows"_a, "taps"_a)
      .def("__len__", [](const FeatureRows& self) { return self.num_rows; });
  nb::class_<TreeSearch>(m, "TreeSearch")
      .def(nb::init<Decoder&, std::vector<int64_t>>(), "decoder"_a, "target_ids"_a, nb::keep_alive<1, 2>())
      .def("run", &run, "block_tables"_a, "num_pairs"_a, "lengths"_a, "token_ids"_a, "positions"_a, "features"_a,
           "block_size"_a, "width"_a, "depth"_a, "counts"_a, "least_gain"_a = 0.0, "least_chance"_a = 0.0)
      .def_prop_ro("num_levels", &TreeSearch::num_levels);
}

}  // namespace llmopt
