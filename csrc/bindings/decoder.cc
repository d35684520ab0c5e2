// Packed matrices, the spec of a decoder, and the decoder. Memory comes as addresses, and Python keeps its owners
// alive.
#include "llmopt/decoder.h"

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "bindings/common.h"
#include "llmopt/decoder_spec.h"
#include "llmopt/fingerprint.h"
#include "llmopt/linear.h"
#include "llmopt/packed_matrix.h"
#include "llmopt/parallel.h"
#include "llmopt/thread_team.h"

using nb::literals::operator""_a;

namespace llmopt {
namespace {

// A member that is a pointer here and an address in Python.
template <class Class, class T>
void def_address(nb::class_<Class>& cls, const char* name, const T* Class::* member) {
  cls.def_prop_rw(
      name, [member](const Class& self) { return reinterpret_cast<uintptr_t>(self.*member); },
      [member](Class& self, uintptr_t address) { self.*member = pointer<const T>(address); });
}

PackedMatrix make_matrix(const MatrixShape& shape, uintptr_t address) {
  if (address % 64 != 0) {
    throw nb::value_error(
        ("a packed matrix at address " + std::to_string(address) + ": it must be aligned to 64 bytes.").c_str());
  }
  return {shape, pointer<const std::byte>(address)};
}

void pack_panels(const MatrixShape& shape, nb::handle row_addresses, int64_t element_stride, SourceType source_type,
                 uintptr_t out, int num_threads, int64_t first_panel) {
  const auto addresses =
      view<Array1<int64_t>>(row_addresses, "row_addresses", "a contiguous int64 array of addresses, 0: a row of zeros");
  const auto num_rows = static_cast<int64_t>(addresses.shape(0));
  const int64_t num_panels = (num_rows + kPanelWidth - 1) / kPanelWidth;
  if (first_panel < 0 || first_panel + num_panels > shape.num_panels()) {
    throw nb::value_error((std::to_string(num_rows) + " rows from panel " + std::to_string(first_panel) +
                           " on: the matrix has " + std::to_string(shape.num_panels()) + " panels of " +
                           std::to_string(kPanelWidth) + " rows.")
                              .c_str());
  }
  const int64_t bytes = panel_bytes(shape);
  const int64_t* rows = addresses.data();
  std::atomic<int64_t> next{0};
  std::atomic<bool> failed{false};
  std::exception_ptr error;
  const nb::gil_scoped_release unlocked;
  parallel_team(num_threads, [&](int, int) {
    for (int64_t i; !failed.load() && (i = next.fetch_add(1)) < num_panels;) {
      SourceRows source;
      source.type = source_type;
      source.element_stride = element_stride;
      const int64_t count = std::min<int64_t>(kPanelWidth, num_rows - i * kPanelWidth);
      for (int64_t r = 0; r < count; ++r) {
        source.rows[r] = pointer<const void>(static_cast<uintptr_t>(rows[i * kPanelWidth + r]));
      }
      try {
        pack_panel(shape, source, pointer<std::byte>(out) + (first_panel + i) * bytes);
      } catch (...) {
        if (!failed.exchange(true)) error = std::current_exception();
      }
    }
  });
  if (error) std::rethrow_exception(error);
}

void unpack_rows(const PackedMatrix& matrix, nb::handle row_indices, uintptr_t out) {
  const auto rows = view<Array1<int64_t>>(row_indices, "rows", "a contiguous int64 array");
  for (size_t i = 0; i < rows.shape(0); ++i) {
    if (rows.data()[i] < 0 || rows.data()[i] >= matrix.shape.num_outputs) {
      throw nb::index_error(("row " + std::to_string(rows.data()[i]) + " of a matrix of " +
                             std::to_string(matrix.shape.num_outputs) + " rows.")
                                .c_str());
    }
  }
  const nb::gil_scoped_release unlocked;
  for (size_t i = 0; i < rows.shape(0); ++i) {
    unpack_row(matrix, rows.data()[i], pointer<float>(out) + static_cast<int64_t>(i) * matrix.shape.num_inputs);
  }
}

using Ids = Array1<int64_t>;

Ids view_ids(nb::handle object, const char* argument) {
  return view<Ids>(object, argument, "a contiguous int64 array on the CPU");
}

std::span<const int64_t> span(const Ids& ids) { return {ids.data(), ids.shape(0)}; }

// The tokens of a step: the arrays that its inputs look at.
struct StepTokens {
  Ids token_ids, positions, logits_indices;

  StepTokens(nb::handle token_ids, nb::handle positions, nb::handle logits_indices)
      : token_ids(view_ids(token_ids, "token_ids")),
        positions(view_ids(positions, "positions")),
        logits_indices(view_ids(logits_indices, "logits_indices")) {}

  DecoderInputs inputs() const {
    DecoderInputs inputs;
    inputs.token_ids = span(token_ids);
    inputs.positions = span(positions);
    inputs.logits_indices = span(logits_indices);
    return inputs;
  }
};

// The result of a step is None, or the best tokens and their logits.
nb::object step(Decoder& decoder, OwningStepPlan& plan, nb::handle token_ids, nb::handle positions,
                nb::handle logits_indices, uintptr_t logits, bool want_best, nb::handle banned_rows,
                nb::handle banned_ids, uintptr_t hidden) {
  const StepTokens tokens(token_ids, positions, logits_indices);
  DecoderInputs inputs = tokens.inputs();
  inputs.logits = pointer<float>(logits);
  inputs.hidden = pointer<float>(hidden);
  Ids rows, ids;
  if (!banned_rows.is_none() || !banned_ids.is_none()) {
    rows = view_ids(banned_rows, "banned_rows");
    ids = view_ids(banned_ids, "banned_ids");
    inputs.banned_rows = span(rows);
    inputs.banned_ids = span(ids);
  }
  std::vector<int64_t> best(want_best ? inputs.logits_indices.size() : 0);
  std::vector<float> best_values(best.size());
  if (want_best) {
    inputs.best = best.data();
    inputs.best_values = best_values.data();
  }
  {
    const nb::gil_scoped_release unlocked;
    decoder.step(inputs, plan.plan);
  }
  if (!want_best) return nb::none();
  return nb::cast(std::make_pair(std::move(best), std::move(best_values)));
}

// The same for a decoder that drafts.
void draft_step(Decoder& decoder, OwningStepPlan& plan, nb::handle token_ids, nb::handle positions,
                nb::handle logits_indices, uintptr_t features, uintptr_t states, uintptr_t states_out, int top,
                uintptr_t top_ids, uintptr_t top_log_probs) {
  const StepTokens tokens(token_ids, positions, logits_indices);
  DecoderInputs inputs = tokens.inputs();
  inputs.features = pointer<const float>(features);
  inputs.states = pointer<const float>(states);
  inputs.states_out = pointer<float>(states_out);
  inputs.top = top;
  inputs.top_ids = pointer<int32_t>(top_ids);
  inputs.top_log_probs = pointer<float>(top_log_probs);
  const nb::gil_scoped_release unlocked;
  decoder.step(inputs, plan.plan);
}

void bind_matrices(nb::module_& m) {
  nb::enum_<WeightFormat>(m, "WeightFormat")
      .value("FLOAT32", WeightFormat::kFloat32)
      .value("BFLOAT16", WeightFormat::kBFloat16)
      .value("INT8", WeightFormat::kInt8)
      .value("INT8_GROUP", WeightFormat::kInt8Group)
      .value("INT4_GROUP", WeightFormat::kInt4Group);
  nb::enum_<SourceType>(m, "SourceType")
      .value("FLOAT32", SourceType::kFloat32)
      .value("BFLOAT16", SourceType::kBFloat16)
      .value("FLOAT16", SourceType::kFloat16);
  nb::enum_<Activation>(m, "Activation")
      .value("NONE", Activation::kNone)
      .value("SILU", Activation::kSilu)
      .value("GELU", Activation::kGelu)
      .value("GELU_TANH", Activation::kGeluTanh)
      .value("RELU", Activation::kRelu)
      .value("RELU_SQUARED", Activation::kReluSquared);

  nb::class_<MatrixShape>(m, "MatrixShape")
      .def(
          "__init__",
          [](MatrixShape* self, WeightFormat format, int64_t num_outputs, int64_t num_inputs, int group_size,
             bool has_minimum) { new (self) MatrixShape{format, num_outputs, num_inputs, group_size, has_minimum}; },
          "format"_a = WeightFormat::kFloat32, "num_outputs"_a = 0, "num_inputs"_a = 0, "group_size"_a = 0,
          "has_minimum"_a = false)
      .def_rw("format", &MatrixShape::format)
      .def_rw("num_outputs", &MatrixShape::num_outputs)
      .def_rw("num_inputs", &MatrixShape::num_inputs)
      .def_rw("group_size", &MatrixShape::group_size)
      .def_rw("has_minimum", &MatrixShape::has_minimum)
      .def_prop_ro("num_panels", &MatrixShape::num_panels)
      .def("__eq__", [](const MatrixShape& a, const MatrixShape& b) { return a == b; }, nb::is_operator());

  nb::class_<PackedMatrix>(m, "PackedMatrix")
      .def(nb::init<>())
      .def(
          "__init__",
          [](PackedMatrix* self, const MatrixShape& shape, uintptr_t address) {
            new (self) PackedMatrix(make_matrix(shape, address));
          },
          "shape"_a, "address"_a)
      .def_ro("shape", &PackedMatrix::shape)
      .def_prop_ro("address", [](const PackedMatrix& self) { return reinterpret_cast<uintptr_t>(self.data); });

  m.def("padded_inputs", &padded_inputs, "shape"_a);
  m.def("panel_bytes", &panel_bytes, "shape"_a);
  m.def("packed_bytes", &packed_bytes, "shape"_a);
  m.def("pack_panels", &pack_panels, "shape"_a, "row_addresses"_a, "element_stride"_a, "source_type"_a, "out_address"_a,
        "num_threads"_a, "first_panel"_a = 0);
  m.def(
      "fingerprint",
      [](uintptr_t address, int64_t num_bytes, int num_threads) {
        const nb::gil_scoped_release unlocked;
        return fingerprint(pointer<const void>(address), num_bytes, num_threads);
      },
      "address"_a, "num_bytes"_a, "num_threads"_a);
  m.def("unpack_rows", &unpack_rows, "matrix"_a, "rows"_a, "out_address"_a);

  nb::class_<LinearTuning>(m, "LinearTuning")
      .def(nb::init<>())
      .def_rw("tile_rows_bf16", &LinearTuning::tile_rows_bf16)
      .def_rw("tile_rows_int8", &LinearTuning::tile_rows_int8)
      .def_rw("tile_rows_group", &LinearTuning::tile_rows_group)
      .def_rw("unpack_rows", &LinearTuning::unpack_rows)
      .def_rw("prefetch_bytes", &LinearTuning::prefetch_bytes);
  m.def("linear_tuning", &linear_tuning, nb::rv_policy::reference);
}

void bind_spec(nb::module_& m) {
  nb::enum_<NormKind>(m, "NormKind")
      .value("NONE", NormKind::kNone)
      .value("RMS", NormKind::kRms)
      .value("LAYER", NormKind::kLayer);
  nb::enum_<RouterKind>(m, "RouterKind")
      .value("SOFTMAX_THEN_TOP", RouterKind::kSoftmaxThenTop)
      .value("TOP_THEN_SOFTMAX", RouterKind::kTopThenSoftmax);

  nb::class_<NormSpec> norm(m, "NormSpec");
  norm.def(
          "__init__",
          [](NormSpec* self, NormKind kind, uintptr_t weight, uintptr_t bias, float epsilon) {
            new (self) NormSpec{kind, pointer<const float>(weight), pointer<const float>(bias), epsilon};
          },
          "kind"_a = NormKind::kNone, "weight"_a = 0, "bias"_a = 0, "epsilon"_a = 0.0f)
      .def_rw("kind", &NormSpec::kind)
      .def_rw("epsilon", &NormSpec::epsilon);
  def_address(norm, "weight", &NormSpec::weight);
  def_address(norm, "bias", &NormSpec::bias);

  nb::class_<LinearSpec> linear(m, "LinearSpec");
  linear
      .def(
          "__init__",
          [](LinearSpec* self, const PackedMatrix& weight, uintptr_t bias) {
            new (self) LinearSpec{weight, pointer<const float>(bias)};
          },
          "weight"_a = PackedMatrix{}, "bias"_a = 0)
      .def_rw("weight", &LinearSpec::weight);
  def_address(linear, "bias", &LinearSpec::bias);

  nb::class_<RopeTable> rope(m, "RopeTable");
  rope.def(
          "__init__",
          [](RopeTable* self, uintptr_t cos, uintptr_t sin, int64_t num_positions, int rotary_dim,
             bool is_interleaved) {
            new (self) RopeTable{pointer<const float>(cos), pointer<const float>(sin), num_positions, rotary_dim,
                                 is_interleaved};
          },
          "cos"_a = 0, "sin"_a = 0, "num_positions"_a = 0, "rotary_dim"_a = 0, "is_interleaved"_a = false)
      .def_rw("num_positions", &RopeTable::num_positions)
      .def_rw("rotary_dim", &RopeTable::rotary_dim)
      .def_rw("is_interleaved", &RopeTable::is_interleaved);
  def_address(rope, "cos", &RopeTable::cos);
  def_address(rope, "sin", &RopeTable::sin);

  // Members of structs are references into them: spec.attention.scale = 0.125 does what it says. Lists are copied on
  // every access: build a Python list and assign it whole.
  nb::class_<AttentionSpec>(m, "AttentionSpec")
      .def(nb::init<>())
      .def_rw("num_heads", &AttentionSpec::num_heads)
      .def_rw("num_kv_heads", &AttentionSpec::num_kv_heads)
      .def_rw("head_dim", &AttentionSpec::head_dim)
      .def_rw("qkv", &AttentionSpec::qkv)
      .def_rw("output", &AttentionSpec::output)
      .def_rw("q_norm", &AttentionSpec::q_norm)
      .def_rw("k_norm", &AttentionSpec::k_norm)
      .def_rw("norm_spans_heads", &AttentionSpec::norm_spans_heads)
      .def_rw("rope", &AttentionSpec::rope)
      .def_rw("scale", &AttentionSpec::scale)
      .def_rw("softcap", &AttentionSpec::softcap)
      .def_rw("sliding_window", &AttentionSpec::sliding_window);
  nb::class_<MlpSpec>(m, "MlpSpec")
      .def(nb::init<>())
      .def_rw("up", &MlpSpec::up)
      .def_rw("down", &MlpSpec::down)
      .def_rw("activation", &MlpSpec::activation)
      .def_rw("is_gated", &MlpSpec::is_gated);
  nb::class_<MoeSpec>(m, "MoeSpec")
      .def(nb::init<>())
      .def_rw("router", &MoeSpec::router)
      .def_rw("kind", &MoeSpec::kind)
      .def_rw("num_top", &MoeSpec::num_top)
      .def_rw("norm_top", &MoeSpec::norm_top)
      .def_rw("experts", &MoeSpec::experts);
  nb::class_<LayerSpec>(m, "LayerSpec")
      .def(nb::init<>())
      .def_rw("before_attention", &LayerSpec::before_attention)
      .def_rw("after_attention", &LayerSpec::after_attention)
      .def_rw("before_mlp", &LayerSpec::before_mlp)
      .def_rw("after_mlp", &LayerSpec::after_mlp)
      .def_rw("attention", &LayerSpec::attention)
      .def_rw("mlp", &LayerSpec::mlp)
      .def_rw("moe", &LayerSpec::moe);
  nb::class_<DraftFront> front(m, "DraftFront");
  nb::enum_<DraftFront::Kind>(front, "Kind")
      .value("NONE", DraftFront::Kind::kNone)
      .value("JOIN", DraftFront::Kind::kJoin)
      .value("SPLIT", DraftFront::Kind::kSplit);
  front.def(nb::init<>())
      .def_rw("kind", &DraftFront::kind)
      .def_rw("fc", &DraftFront::fc)
      .def_rw("token_norm", &DraftFront::token_norm)
      .def_rw("feature_norm", &DraftFront::feature_norm)
      .def_rw("part_norms", &DraftFront::part_norms)
      .def_rw("norm_residual", &DraftFront::norm_residual)
      .def_rw("shows_normed", &DraftFront::shows_normed);
  nb::class_<DecoderSpec> decoder(m, "DecoderSpec");
  decoder.def(nb::init<>())
      .def_rw("hidden_size", &DecoderSpec::hidden_size)
      .def_rw("vocab_size", &DecoderSpec::vocab_size)
      .def_rw("embedding", &DecoderSpec::embedding)
      .def_rw("embedding_scale", &DecoderSpec::embedding_scale)
      .def_rw("num_positions", &DecoderSpec::num_positions)
      .def_rw("embedding_norm", &DecoderSpec::embedding_norm)
      .def_rw("ropes", &DecoderSpec::ropes)
      .def_rw("layers", &DecoderSpec::layers)
      .def_rw("residual_scale", &DecoderSpec::residual_scale)
      .def_rw("final_norm", &DecoderSpec::final_norm)
      .def_rw("head", &DecoderSpec::head)
      .def_rw("logit_scale", &DecoderSpec::logit_scale)
      .def_rw("logit_softcap", &DecoderSpec::logit_softcap)
      .def_rw("hidden_layers", &DecoderSpec::hidden_layers)
      .def_rw("draft", &DecoderSpec::draft)
      .def_rw("head_size", &DecoderSpec::head_size);
  def_address(decoder, "position_embedding", &DecoderSpec::position_embedding);
}

}  // namespace

void bind_decoder(nb::module_& m) {
  bind_matrices(m);
  bind_spec(m);

  nb::class_<ThreadTeam>(m, "ThreadTeam")
      .def(
          "__init__",
          [](ThreadTeam* self, int num_threads, std::vector<int> cpus, bool pin, int spin_us) {
            new (self) ThreadTeam(ThreadTeamOptions{num_threads, std::move(cpus), pin, spin_us});
          },
          "num_threads"_a, "cpus"_a = std::vector<int>{}, "pin"_a = true, "spin_us"_a = 200)
      .def_prop_ro("size", &ThreadTeam::size);

  nb::class_<Decoder>(m, "Decoder")
      .def(
          "__init__",
          [](Decoder* self, const DecoderSpec& spec, const std::vector<LayerCache>& caches,
             std::shared_ptr<ThreadTeam> team) { new (self) Decoder(spec, caches, std::move(team)); },
          "spec"_a, "caches"_a, "team"_a)
      .def("step", &step, "plan"_a, "token_ids"_a, "positions"_a, "logits_indices"_a, "logits_address"_a = 0,
           "want_best"_a = false, "banned_rows"_a = nb::none(), "banned_ids"_a = nb::none(), "hidden_address"_a = 0)
      .def("draft_step", &draft_step, "plan"_a, "token_ids"_a, "positions"_a, "logits_indices"_a,
           "features_address"_a = 0, "states_address"_a = 0, "states_out_address"_a = 0, "top"_a = 0,
           "top_ids_address"_a = 0, "top_log_probs_address"_a = 0)
      .def_prop_rw("is_profiling", &Decoder::is_profiling, &Decoder::set_profiling)
      .def("profile", [](const Decoder& self) {
        nb::dict times;
        for (const auto& [phase, seconds] : self.profile()) times[phase] = seconds;
        return times;
      });
}

}  // namespace llmopt
