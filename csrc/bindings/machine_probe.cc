#include "llmopt/machine_probe.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include "bindings/machine_probe.h"

namespace nb = nanobind;
using nb::literals::operator""_a;

namespace llmopt {

void bind_machine_probe(nb::module_& m) {
  nb::class_<BandwidthProbe>(m, "BandwidthProbe")
      .def(nb::init<size_t, std::vector<int>>(), "max_bytes"_a, "cpus"_a, nb::call_guard<nb::gil_scoped_release>())
      .def("measure", &BandwidthProbe::measure, "num_bytes"_a, "num_threads"_a, "seconds"_a,
           nb::call_guard<nb::gil_scoped_release>());
  m.def("peak_kinds", &peak_kinds);
  m.def("measure_peak", &measure_peak, "kind"_a, "cpus"_a, "seconds"_a, nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace llmopt
