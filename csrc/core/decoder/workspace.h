// Memory of the decoder, kept between steps: it grows when a step is larger than all before.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>

#include "llmopt/linear.h"

namespace llmopt::decoder {

// Values of one type, 64-byte aligned, on huge pages when they are many. What is in it does not survive growing.
template <class T>
class Array {
 public:
  T* resize(int64_t count) {
    data_ = reinterpret_cast<T*>(memory_.at_least(static_cast<size_t>(count) * sizeof(T)));
    return data_;
  }
  T* data() const { return data_; }
  T& operator[](int64_t i) const { return data_[i]; }

 private:
  LinearScratch memory_;
  T* data_ = nullptr;
};

// One buffer of input rows per form and width. A model has few of them.
class InputSet {
 public:
  InputBuffer& at(InputForm form, int64_t num_inputs) {
    for (Entry& entry : entries_) {
      if (entry.form == form && entry.num_inputs == num_inputs) return entry.buffer;
    }
    Entry& entry = entries_.emplace_back();
    entry.form = form;
    entry.num_inputs = num_inputs;
    return entry.buffer;
  }

 private:
  struct Entry {
    InputForm form;
    int64_t num_inputs;
    InputBuffer buffer;
  };
  std::deque<Entry> entries_;  // entries do not move
};

// Can a kernel store its results there as they are, without fill_row?
inline bool is_dense(InputForm form) { return form == InputForm::kFloat32 || form == InputForm::kBFloat16; }
inline std::byte* writable(InputBuffer& buffer) { return const_cast<std::byte*>(buffer.rows().data); }

// Zero the values from `begin` to the end of each row.
inline void clear_padding(InputBuffer& buffer, int64_t begin) {
  const InputRows& rows = buffer.rows();
  const int64_t size = rows.form == InputForm::kFloat32 ? 4 : 2;
  const int64_t padding = rows.row_bytes - begin * size;
  for (int64_t i = 0; padding > 0 && i < rows.num_rows; ++i) {
    std::memset(writable(buffer) + i * rows.row_bytes + begin * size, 0, padding);
  }
}

}  // namespace llmopt::decoder
