// Tokens drawn from rows of logits, each row with its own parameters.
#include "llmopt/sample.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <vector>

#include "bindings/common.h"
#include "llmopt/argmax.h"
#include "llmopt/parallel.h"

using nb::literals::operator""_a;

namespace llmopt {
namespace {

// With places, those rows of the num_rows alone, in their order. Returns one id per row; -1 where the best logit of a
// row is not finite.
std::vector<int64_t> sample_rows(uintptr_t rows, int64_t num_rows, int64_t size, int64_t row_stride,
                                 const std::vector<float>& temperature, const std::vector<int64_t>& top_k,
                                 const std::vector<double>& top_p, const std::vector<double>& min_p,
                                 const std::vector<double>& draw, int num_threads, const std::vector<int64_t>& places) {
  check_places(places, num_rows);
  const bool has_places = !places.empty();
  if (has_places) num_rows = static_cast<int64_t>(places.size());
  const auto count = static_cast<size_t>(num_rows);
  if (num_rows < 0 || size < 1 || temperature.size() != count || top_k.size() != count || top_p.size() != count ||
      min_p.size() != count || draw.size() != count) {
    throw nb::value_error(("sampling from " + std::to_string(num_rows) + " rows of " + std::to_string(size) +
                           " logits needs as many temperatures, top_k, top_p, min_p and draws; got " +
                           std::to_string(temperature.size()) + ", " + std::to_string(top_k.size()) + ", " +
                           std::to_string(top_p.size()) + ", " + std::to_string(min_p.size()) + " and " +
                           std::to_string(draw.size()) + ".")
                              .c_str());
  }
  std::vector<int64_t> tokens(count);
  const auto* data = pointer<const float>(rows);
  const auto run = [&](int thread, int team) {
    thread_local Sampler sampler;
    for (int64_t row = thread; row < num_rows; row += team) {
      const float* logits = data + (has_places ? places[row] : row) * row_stride;
      const float best = argmax(logits, size).value;
      const bool is_finite = best - best == 0.0f;
      tokens[row] = is_finite
                        ? sampler(logits, size, best, {temperature[row], top_k[row], top_p[row], min_p[row], draw[row]})
                        : -1;
    }
  };
  constexpr double kNsPerValue = 1.0;
  run_unlocked_if_long(kNsPerValue * static_cast<double>(num_rows * size), [&] {
    if (num_rows > 1) {
      parallel_team(num_threads, run);
    } else {
      run(0, 1);
    }
  });
  return tokens;
}

}  // namespace

void bind_sample(nb::module_& m) {
  m.def("sample_rows", &sample_rows, "rows"_a, "num_rows"_a, "size"_a, "row_stride"_a, "temperature"_a, "top_k"_a,
        "top_p"_a, "min_p"_a, "draw"_a, "num_threads"_a, "places"_a = std::vector<int64_t>{});
}

}  // namespace llmopt
