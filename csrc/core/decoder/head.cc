// The end of a step: the rows whose logits are wanted, the final norm, the head, and the best token of each row.
#include <algorithm>
#include <cmath>

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
  if (rows > 0 && (inputs_.logits || inputs_.best)) prepare_shared(spec_.head.weight, rows, head_inputs_);
}

void Forward::head(Worker& worker) {
  const auto rows = static_cast<int64_t>(inputs_.logits_indices.size());
  worker.best.clear();
  if (rows == 0 || !(inputs_.logits || inputs_.best)) return;
  const PackedMatrix& matrix = spec_.head.weight;
  const int64_t hidden = spec_.hidden_size, vocab = spec_.vocab_size;
  InputBuffer& buffer = head_inputs_.at(input_form(matrix.shape, rows), hidden);
  const Range mine = share(rows, worker.thread, worker.size);
  for (int64_t i = mine.begin; i < mine.end; ++i) {
    const float* x = residual_.data() + inputs_.logits_indices[i] * hidden;
    buffer.fill_row(i, norm(spec_.final_norm, x, hidden, worker.row.data()));
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
    if (spec_.logit_softcap == 0 && !inputs_.best) continue;
    const bool is_first = worker.best.empty();
    if (is_first) worker.best.resize(rows);
    for (int64_t i = 0; i < rows; ++i) {
      float* row = logits + i * output.row_stride;
      if (spec_.logit_softcap > 0) kernels_.softcap(row, columns, spec_.logit_softcap);
      if (!inputs_.best) continue;
      Best best = argmax(row, columns);
      best.index += first;
      worker.best[i] = is_first ? best : better(worker.best[i], best);
    }
  }
  mark(worker, Phase::kHead);
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
