// The binding of llmopt/pack_drafts.h. The arrays of the batch are known from the start; those of the drafts come with
// each call, and are looked at through the buffer protocol: between two forwards everything else is out of the caches.
#include "llmopt/pack_drafts.h"

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <string_view>
#include <tuple>
#include <vector>

#include "bindings/common.h"
#include "llmopt/step_plan.h"

namespace llmopt {
namespace {

template <class T, int kDims>
using Filled = nb::ndarray<T, nb::ndim<kDims>, nb::device::cpu, nb::c_contig>;

// The memory of an array for the time of a call, if it is what was asked for: contiguous, of this type and shape.
template <class T>
class Borrowed {
 public:
  Borrowed(nb::handle array, int num_dims) {
    is_open_ = PyObject_GetBuffer(array.ptr(), &buffer_, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT) == 0;
    if (!is_open_) PyErr_Clear();
    is_right_ = is_open_ && buffer_.ndim == num_dims && buffer_.itemsize == sizeof(T) && has_signed_integers();
  }
  ~Borrowed() {
    if (is_open_) PyBuffer_Release(&buffer_);
  }
  Borrowed(const Borrowed&) = delete;
  Borrowed& operator=(const Borrowed&) = delete;

  explicit operator bool() const { return is_right_; }
  int64_t size(int axis) const { return buffer_.shape[axis]; }
  const T* data() const { return static_cast<const T*>(buffer_.buf); }

 private:
  bool has_signed_integers() const {
    const std::string_view format = buffer_.format ? buffer_.format : "B";
    return format == "i" || format == "l" || format == "q";
  }

  Py_buffer buffer_{};
  bool is_open_ = false, is_right_ = false;
};

// All arrays hold rows for as many requests; those of tokens, kMaxDrafts more for each.
struct DraftPacker {
  Filled<const int64_t, 1> token_ids, positions;
  Filled<const int32_t, 1> seq_lens;
  Filled<const int32_t, 2> block_tables;
  Filled<int64_t, 1> packed_ids, packed_positions, packed_slots;
  Filled<uint64_t, 1> packed_masks;
  Filled<int32_t, 1> num_scheduled, packed_lens, cu_seqlens_q;
  int64_t block_size;
};

DraftPacker make_packer(Filled<const int64_t, 1> token_ids, Filled<const int64_t, 1> positions,
                        Filled<const int32_t, 1> seq_lens, Filled<const int32_t, 2> block_tables,
                        Filled<int64_t, 1> packed_ids, Filled<int64_t, 1> packed_positions,
                        Filled<int64_t, 1> packed_slots, Filled<uint64_t, 1> packed_masks,
                        Filled<int32_t, 1> num_scheduled, Filled<int32_t, 1> packed_lens,
                        Filled<int32_t, 1> cu_seqlens_q, int64_t block_size) {
  const size_t rows = seq_lens.shape(0), tokens = rows * (1 + kMaxDrafts);
  const bool is_right = token_ids.shape(0) >= rows && positions.shape(0) >= rows && block_tables.shape(0) >= rows &&
                        packed_ids.shape(0) >= tokens && packed_positions.shape(0) >= tokens &&
                        packed_slots.shape(0) >= tokens && packed_masks.shape(0) >= tokens &&
                        num_scheduled.shape(0) >= rows && packed_lens.shape(0) >= rows &&
                        cu_seqlens_q.shape(0) >= rows + 1 && block_size > 0;
  if (!is_right) throw nb::value_error("the arrays are too small for the rows of seq_lens and all their drafts.");
  return {token_ids,    positions,    seq_lens,      block_tables, packed_ids,   packed_positions,
          packed_slots, packed_masks, num_scheduled, packed_lens,  cu_seqlens_q, block_size};
}

using Packed = std::tuple<int, std::vector<int32_t>>;

Packed pack(const DraftPacker& self, int64_t table_width, const std::vector<int64_t>& rooms, int64_t vocab_size,
            bool allows_trees, nb::handle token_ids, nb::handle num_draft, nb::handle parents) {
  const Packed refused{static_cast<int>(DraftForm::kBroken), {}};
  const auto num_rows = static_cast<int64_t>(rooms.size());
  if (num_rows > static_cast<int64_t>(self.seq_lens.shape(0)) || table_width < 0 ||
      table_width > static_cast<int64_t>(self.block_tables.shape(1))) {
    throw nb::value_error("more rows or blocks than this packer has arrays for.");
  }
  const Borrowed<int64_t> ids(token_ids, 2);
  const Borrowed<int32_t> counts(num_draft, 1);
  if (!ids || !counts || ids.size(0) != num_rows || counts.size(0) != num_rows) return refused;
  const int64_t width = ids.size(1);
  for (int64_t b = 0; b < num_rows; ++b) {
    const int64_t most = std::min({rooms[b], width, int64_t{kMaxDrafts}});
    if (const int32_t count = counts.data()[b]; count != 0 && (count < 0 || count > most)) return refused;
  }
  const DecodeRows rows{num_rows,
                        self.token_ids.data(),
                        self.positions.data(),
                        self.seq_lens.data(),
                        self.block_tables.data(),
                        static_cast<int64_t>(self.block_tables.shape(1)),
                        table_width,
                        self.block_size};
  const PackedRows packed{self.packed_ids.data(),   self.packed_positions.data(), self.packed_slots.data(),
                          self.packed_masks.data(), self.num_scheduled.data(),    self.packed_lens.data(),
                          self.cu_seqlens_q.data()};
  const auto run = [&](const int32_t* followed) {
    const DraftRows drafts{ids.data(), counts.data(), followed, width};
    const DraftForm form = pack_drafts(rows, drafts, vocab_size, packed);
    if (form == DraftForm::kBroken || (form == DraftForm::kTrees && !allows_trees)) return refused;
    return Packed{static_cast<int>(form), {counts.data(), counts.data() + num_rows}};
  };
  if (parents.is_none()) return run(nullptr);
  const Borrowed<int32_t> followed(parents, 2);
  if (!followed || followed.size(0) != num_rows || followed.size(1) != width) return refused;
  return run(followed.data());
}

}  // namespace

void bind_pack_drafts(nb::module_& m) {
  nb::class_<DraftPacker>(m, "DraftPacker")
      .def("__init__",
           [](DraftPacker* self, Filled<const int64_t, 1> token_ids, Filled<const int64_t, 1> positions,
              Filled<const int32_t, 1> seq_lens, Filled<const int32_t, 2> block_tables, Filled<int64_t, 1> packed_ids,
              Filled<int64_t, 1> packed_positions, Filled<int64_t, 1> packed_slots, Filled<uint64_t, 1> packed_masks,
              Filled<int32_t, 1> num_scheduled, Filled<int32_t, 1> packed_lens, Filled<int32_t, 1> cu_seqlens_q,
              int64_t block_size) {
             new (self) DraftPacker(make_packer(token_ids, positions, seq_lens, block_tables, packed_ids,
                                                packed_positions, packed_slots, packed_masks, num_scheduled,
                                                packed_lens, cu_seqlens_q, block_size));
           })
      .def("pack", &pack, nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg().none());
}

}  // namespace llmopt
