// The binding of llmopt/suffix_automaton.h. Texts are arrays of int64.
#include "llmopt/suffix_automaton.h"

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <span>
#include <utility>
#include <vector>

#include "bindings/common.h"

using nb::literals::operator""_a;

namespace llmopt {
namespace {

using Tokens = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Drafted = std::pair<int32_t, std::vector<int64_t>>;

std::span<const int64_t> first_of(const Tokens& tokens, int64_t count) {
  if (count < 0 || count > static_cast<int64_t>(tokens.size())) throw nb::index_error("there are not so many tokens");
  return {tokens.data(), static_cast<size_t>(count)};
}

Drafted follow(const SuffixAutomaton& self, SuffixMatch match, int32_t count, int32_t min_length) {
  if (match.length < min_length) return {0, {}};
  return {match.length, self.follow(match, count)};
}

}  // namespace

void bind_suffix_automaton(nb::module_& m) {
  nb::class_<SuffixAutomaton>(m, "SuffixAutomaton")
      .def(nb::init<>())
      .def("__len__", &SuffixAutomaton::size)
      .def_prop_ro("num_bytes", &SuffixAutomaton::num_bytes)
      .def(
          "extend", [](SuffixAutomaton& self, const Tokens& tokens) { self.extend(first_of(tokens, tokens.size())); },
          "tokens"_a)
      .def(
          "draft",
          [](SuffixAutomaton& self, const Tokens& tokens, int64_t num_tokens, int32_t count, int32_t min_length) {
            const auto text = first_of(tokens, num_tokens);
            if (num_tokens < self.size()) throw nb::index_error("the text has become shorter");
            self.extend(text.subspan(self.size()));
            return follow(self, self.last(), count, min_length);
          },
          "tokens"_a, "num_tokens"_a, "count"_a, "min_length"_a)
      .def(
          "draft_for",
          [](const SuffixAutomaton& self, const Tokens& tokens, int64_t num_tokens, int32_t count, int32_t min_length,
             int32_t max_length) {
            const auto text = first_of(tokens, num_tokens);
            return follow(self, self.find(text.last(std::min<size_t>(text.size(), max_length))), count, min_length);
          },
          "tokens"_a, "num_tokens"_a, "count"_a, "min_length"_a, "max_length"_a);
}

}  // namespace llmopt
