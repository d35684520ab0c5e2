// Tensors of GGUF files: packed as they are, or dequantized. Memory comes as addresses.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <atomic>
#include <exception>
#include <string>
#include <vector>

#include "bindings/common.h"
#include "llmopt/gguf_block.h"
#include "llmopt/parallel.h"
#include "llmopt/quantized_panel.h"

using nb::literals::operator""_a;

namespace llmopt {
namespace {

using Addresses = Array1<int64_t>;

// Run `work(i)` for every i below `count` on a team of threads; the first exception stops it and comes out.
template <class Work>
void for_each_unlocked(int64_t count, int num_threads, const Work& work) {
  std::atomic<int64_t> next{0};
  std::atomic<bool> failed{false};
  std::exception_ptr error;
  const nb::gil_scoped_release unlocked;
  parallel_team(num_threads, [&](int, int) {
    for (int64_t i; !failed.load() && (i = next.fetch_add(1)) < count;) {
      try {
        work(i);
      } catch (...) {
        if (!failed.exchange(true)) error = std::current_exception();
      }
    }
  });
  if (error) std::rethrow_exception(error);
}

void pack_panels(const MatrixShape& shape, uint32_t type_number, nb::handle panel_numbers, nb::handle row_addresses,
                 uintptr_t out, int num_threads) {
  const auto type = static_cast<GgufType>(type_number);
  const GgufLayout layout = gguf_layout(type);
  const auto panels = view<Addresses>(panel_numbers, "panels", "a contiguous int64 array");
  const auto rows = view<Addresses>(row_addresses, "row_addresses", "a contiguous int64 array of addresses, 0: zeros");
  if (layout.format != shape.format || layout.group_size != shape.group_size || layout.group_size == 0 ||
      layout.has_minimum != shape.has_minimum) {
    throw nb::value_error(("GGUF type " + std::to_string(type_number) + " does not fit a matrix of format " +
                           name(shape.format) + ", groups of " + std::to_string(shape.group_size) + ".")
                              .c_str());
  }
  if (rows.shape(0) != panels.shape(0) * kPanelWidth) {
    throw nb::value_error(("row_addresses: " + std::to_string(panels.shape(0)) + " panels have 16 rows each; got " +
                           std::to_string(rows.shape(0)) + ".")
                              .c_str());
  }
  for (size_t i = 0; i < panels.shape(0); ++i) {
    if (panels.data()[i] < 0 || panels.data()[i] >= shape.num_panels()) {
      throw nb::index_error(("panel " + std::to_string(panels.data()[i]) + " of a matrix of " +
                             std::to_string(shape.num_panels()) + " panels.")
                                .c_str());
    }
  }
  const int64_t bytes = panel_bytes(shape), num_inputs = shape.num_inputs, num_groups = num_inputs / shape.group_size;
  for_each_unlocked(static_cast<int64_t>(panels.shape(0)), num_threads, [&](int64_t i) {
    std::vector<uint8_t> values(kPanelWidth * num_inputs);
    std::vector<float> scales(kPanelWidth * num_groups), minimums(kPanelWidth * num_groups);
    QuantizedRows source;
    for (int r = 0; r < kPanelWidth; ++r) {
      const auto address = static_cast<uintptr_t>(rows.data()[i * kPanelWidth + r]);
      if (address == 0) continue;
      uint8_t* row_values = values.data() + r * num_inputs;
      float *row_scales = scales.data() + r * num_groups, *row_minimums = minimums.data() + r * num_groups;
      decode_gguf_row(type, pointer<const std::byte>(address), num_inputs, row_values, row_scales, row_minimums);
      source.values[r] = row_values;
      source.scales[r] = row_scales;
      source.minimums[r] = shape.has_minimum ? row_minimums : nullptr;
    }
    pack_quantized_panel(shape, source, pointer<std::byte>(out) + panels.data()[i] * bytes);
  });
}

void dequantize_rows(uint32_t type, nb::handle row_addresses, int64_t num_inputs, uintptr_t out, int num_threads) {
  const auto rows = view<Addresses>(row_addresses, "row_addresses", "a contiguous int64 array of addresses");
  constexpr int64_t kChunk = 64;
  const auto num_rows = static_cast<int64_t>(rows.shape(0));
  for_each_unlocked((num_rows + kChunk - 1) / kChunk, num_threads, [&](int64_t chunk) {
    for (int64_t i = chunk * kChunk; i < num_rows && i < (chunk + 1) * kChunk; ++i) {
      dequantize_gguf_row(static_cast<GgufType>(type), pointer<const std::byte>(static_cast<uintptr_t>(rows.data()[i])),
                          num_inputs, pointer<float>(out) + i * num_inputs);
    }
  });
}

}  // namespace

void bind_gguf(nb::module_& m) {
  m.def("pack_gguf_panels", &pack_panels, "shape"_a, "type"_a, "panels"_a, "row_addresses"_a, "out_address"_a,
        "num_threads"_a);
  m.def("dequantize_gguf_rows", &dequantize_rows, "type"_a, "row_addresses"_a, "num_inputs"_a, "out_address"_a,
        "num_threads"_a);
}

}  // namespace llmopt
