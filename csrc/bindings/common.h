// What the binding sources share: addresses, views of arrays, and the plan that keeps its arrays alive.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <string>
#include <vector>

#include "llmopt/step_plan.h"

namespace nb = nanobind;

namespace llmopt {

// A call shorter than this keeps the interpreter lock: releasing and taking it again costs a good part of a
// microsecond.
constexpr double kMinUnlockedNs = 10000;

template <class Call>
void run_unlocked_if_long(double estimated_ns, const Call& call) {
  if (estimated_ns < kMinUnlockedNs) {
    call();
  } else {
    nb::gil_scoped_release unlocked;
    call();
  }
}

template <class T>
T* pointer(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

template <class T>
using Array1 = nb::ndarray<const T, nb::ndim<1>, nb::device::cpu, nb::c_contig>;
using Table = nb::ndarray<const int32_t, nb::ndim<2>, nb::device::cpu>;

// A plan that keeps the arrays it looks at alive.
struct OwningStepPlan {
  StepPlan plan;
  Table block_tables;
  Array1<int32_t> seq_lens, cu_seqlens_q;
  Array1<int64_t> slot_mapping;
  Array1<int32_t> num_drafts;
  Array1<uint64_t> draft_masks;
};

// The array itself, never a converted copy: the plan looks at its memory for the whole step.
template <class Array>
Array view(nb::handle object, const char* argument, const char* expected) {
  Array array;
  if (nb::try_cast(object, array, /*convert=*/false)) return array;
  const auto describe = [&](const char* attribute) {
    if (!nb::hasattr(object, attribute)) return std::string("no ") + attribute;
    return std::string(attribute) + " " + nb::repr(nb::getattr(object, attribute)).c_str();
  };
  const std::string found = nb::type_name(object.type()).c_str();
  throw nb::value_error((std::string(argument) + " must be " + expected + "; got " + found + " with " +
                         describe("dtype") + ", " + describe("shape") + ".")
                            .c_str());
}

// Rows of a matrix that a call picks.
inline void check_places(const std::vector<int64_t>& places, int64_t num_rows) {
  for (const int64_t place : places) {
    if (place < 0 || place >= num_rows) {
      throw nb::index_error(
          ("row " + std::to_string(place) + " of a matrix of " + std::to_string(num_rows) + " rows.").c_str());
    }
  }
}

// Defined in block_pool.cc.
void bind_block_pool(nb::module_& m);
// Defined in decoder.cc: packed matrices, the decoder and what it is made of.
void bind_decoder(nb::module_& m);
// Defined in fused.cc: norms, gated activations, rotation, products with few rows.
void bind_fused(nb::module_& m);
// Defined in gguf.cc: tensors of GGUF files, packed or dequantized.
void bind_gguf(nb::module_& m);
// Defined in pack_drafts.cc: batches of decodes with drafts.
void bind_pack_drafts(nb::module_& m);
// Defined in prefix_index.cc: what the blocks of a pool hold.
void bind_prefix_index(nb::module_& m);
// Defined in sample.cc: tokens drawn from rows of logits.
void bind_sample(nb::module_& m);
void bind_suffix_automaton(nb::module_& m);
// Defined in tree_search.cc: drafts of a decoder that drafts.
void bind_tree_search(nb::module_& m);

}  // namespace llmopt
