// The bindings of llmopt/machine_probe.h.
#pragma once

#include <nanobind/nanobind.h>

namespace llmopt {

void bind_machine_probe(nanobind::module_& m);

}  // namespace llmopt
