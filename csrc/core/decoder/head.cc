// The end of a step: the rows whose logits are wanted, the final norm, the head, and the best token of each row.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>

#include "core/decoder/forward.h"

namespace llmopt::decoder {
namespace {

// Where only the best is wanted, logits are made in chunks that stay in the first-level cache.
constexpr int64_t kChunkFloats = 16384;
constexpr int64_t kMinChunkPanels = 8, kMaxChunkPanels = 256;

// a stands before b: the first of equal values wins, and the first NaN over all, as in argmax().
Best better(const Best& a, const Best& b) {
  if (std::isnan(a.value)) return a;
  return std::isnan(b.value) || b.value > a.value ? b : a;
}

}  // namespace

void Forward::prepare_head() {
  const auto rows = static_cast<int64_t>(inputs_.logits_indices.size());
  if (inputs_.top > 0) inputs_.logits = logits_.resize(rows * spec_.num_logits());
  if (rows > 0 && (inputs_.logits || inputs_.best)) prepare_shared(spec_.head.weight, rows, head_inputs_);
  const auto banned_rows = inputs_.banned_rows, banned_ids = inputs_.banned_ids;
  if (banned_rows.size() != banned_ids.size()) {
    throw std::invalid_argument(std::to_string(banned_rows.size()) + " banned_rows and " +
                                std::to_string(banned_ids.size()) + " banned_ids; one of each makes a pair.");
  }
  banned_.clear();
  for (size_t i = 0; i < banned_rows.size(); ++i) {
    if (banned_rows[i] < 0 || banned_rows[i] >= rows) {
      throw std::out_of_range("banned_rows[" + std::to_string(i) + "] is " + std::to_string(banned_rows[i]) +
                              ", there are " + std::to_string(rows) + " rows of logits.");
    }
    banned_.push_back({banned_ids[i], banned_rows[i]});
  }
  std::ranges::sort(banned_, {}, &Banned::id);
}

void Forward::head(Worker& worker) {
  const auto rows = static_cast<int64_t>(inputs_.logits_indices.size());
  worker.best.clear();
  if (rows == 0 || !(inputs_.logits || inputs_.best)) return;
  const PackedMatrix& matrix = spec_.head.weight;
  const int64_t hidden = spec_.hidden_size, vocab = spec_.num_logits();
  InputBuffer& buffer = head_inputs_.at(input_form(matrix.shape, rows), hidden);
  const Range mine = share(rows, worker.thread, worker.size);
  for (int64_t i = mine.begin; i < mine.end; ++i) {
    const float* x = residual_.data() + inputs_.logits_indices[i] * hidden;
    const float* normed = norm(spec_.final_norm, x, hidden, worker.row.data());
    buffer.fill_row(i, normed);
    if (inputs_.states_out) {
      std::memcpy(inputs_.states_out + i * hidden, spec_.draft.shows_normed ? normed : x, hidden * sizeof(float));
    }
  }
  mark(worker, Phase::kNorm);
  barrier(worker);

  const Range panels = share(matrix.shape.num_panels(), worker.thread, worker.size);
  const int64_t chunk = std::clamp(kChunkFloats / (rows * kPanelWidth), kMinChunkPanels, kMaxChunkPanels);
  for (int64_t panel = panels.begin; panel < panels.end; panel += chunk) {
    const int64_t count = std::min(chunk, panels.end - panel), first = panel * kPanelWidth;
    const int64_t columns = std::min(count * kPanelWidth, vocab - first);
    // These panels are a matrix of their own, whose columns go where the logits of this chunk go.
    PackedMatrix part = matrix;
    part.shape.num_outputs = columns;
    part.data = matrix.panel(panel);
    LinearOutput output;
    output.row_stride = inputs_.logits ? vocab : chunk * kPanelWidth;
    float* logits = inputs_.logits ? inputs_.logits + first : worker.logits.resize(rows * output.row_stride);
    output.out = logits;
    output.bias = spec_.head.bias ? spec_.head.bias + first : nullptr;
    output.scale = spec_.logit_scale;
    linear(part, buffer.rows(), output, 0, count, worker.scratch);
    auto banned = std::ranges::lower_bound(banned_, first, {}, &Banned::id);
    const auto banned_end = std::ranges::lower_bound(banned, banned_.end(), first + columns, {}, &Banned::id);
    const bool is_capped = spec_.logit_softcap > 0;
    for (int64_t i = 0; is_capped && i < rows; ++i) {
      kernels_.softcap(logits + i * output.row_stride, columns, spec_.logit_softcap);
    }
    for (; banned != banned_end; ++banned) {
      logits[banned->row * output.row_stride + banned->id - first] = -std::numeric_limits<float>::infinity();
    }
    if (!inputs_.best) continue;
    const bool is_first = worker.best.empty();
    if (is_first) worker.best.resize(rows);
    for (int64_t i = 0; i < rows; ++i) {
      Best best = argmax(logits + i * output.row_stride, columns);
      best.index += first;
      worker.best[i] = is_first ? best : better(worker.best[i], best);
    }
  }
  mark(worker, Phase::kHead);
  if (inputs_.top > 0) choose_top(worker);
}

// Threads have ascending ranges of columns.
void Forward::finish_head() {
  if (!inputs_.best) return;
  for (size_t i = 0; i < inputs_.logits_indices.size(); ++i) {
    const Best* top = nullptr;
    Best merged{};
    for (const auto& worker : workers_) {
      if (worker->best.empty()) continue;
      merged = top ? better(merged, worker->best[i]) : worker->best[i];
      top = &merged;
    }
    inputs_.best[i] = merged.index;
    if (inputs_.best_values) inputs_.best_values[i] = merged.value;
  }
}

}  // namespace llmopt::decoder
