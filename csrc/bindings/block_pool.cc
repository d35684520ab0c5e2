// The binding of llmopt/block_pool.h. Keys are bytes, 16 for each.
#include "llmopt/block_pool.h"

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "bindings/common.h"

using nb::literals::operator""_a;

namespace llmopt {
namespace {

using Blocks = std::vector<int32_t>;

// A call that the state of the pool does not allow is a mistake in the caller's code.
template <class Call>
auto checked(const Call& call) {
  try {
    return call();
  } catch (const std::out_of_range&) {
    throw nb::index_error("the pool has no such block");
  } catch (const std::logic_error& error) {
    PyErr_SetString(PyExc_AssertionError, error.what());
    throw nb::python_error();
  }
}

BlockKey key_at(const nb::bytes& keys, size_t index) {
  BlockKey key;
  std::memcpy(&key, static_cast<const char*>(keys.data()) + index * sizeof(BlockKey), sizeof(BlockKey));
  return key;
}

BlockKey only_key(const nb::bytes& key) {
  if (key.size() != sizeof(BlockKey)) {
    throw nb::value_error(("a key has 16 bytes, found " + std::to_string(key.size()) + ".").c_str());
  }
  return key_at(key, 0);
}

nb::bytes bytes_of(const BlockKey& key) { return nb::bytes(reinterpret_cast<const char*>(&key), sizeof(key)); }

// The blocks of the first keys, up to the first key that no block has.
Blocks find(const BlockPool& self, const nb::bytes& keys) {
  if (keys.size() % sizeof(BlockKey) != 0) {
    throw nb::value_error(("keys have 16 bytes each, found " + std::to_string(keys.size()) + " together.").c_str());
  }
  Blocks blocks;
  for (size_t index = 0; index < keys.size() / sizeof(BlockKey); ++index) {
    const int32_t block = self.find(key_at(keys, index));
    if (block < 0) break;
    blocks.push_back(block);
  }
  return blocks;
}

std::pair<Blocks, std::vector<nb::bytes>> evict(BlockPool& self, int32_t count) {
  auto [blocks, keys] = checked([&] { return self.evict(count); });
  std::vector<nb::bytes> as_bytes;
  for (const BlockKey& key : keys) as_bytes.push_back(bytes_of(key));
  return {std::move(blocks), std::move(as_bytes)};
}

}  // namespace

void bind_block_pool(nb::module_& m) {
  nb::class_<BlockPool>(m, "BlockPool")
      .def(nb::init<int32_t>(), "num_blocks"_a)
      .def_prop_ro("num_unused", &BlockPool::num_unused)
      .def_prop_ro("num_kept", &BlockPool::num_kept)
      .def_prop_ro("num_keys", &BlockPool::num_keys)
      .def_prop_ro("ref_counts",
                   [](nb::handle_t<BlockPool> self) {
                     Blocks& counts = nb::cast<BlockPool&>(self).counts();
                     return nb::ndarray<nb::numpy, int32_t, nb::ndim<1>>(counts.data(), {counts.size()}, self);
                   })
      .def("allocate", [](BlockPool& self, int32_t count) { return checked([&] { return self.allocate(count); }); })
      .def("evict", &evict)
      .def("share", [](BlockPool& self, const Blocks& blocks) { checked([&] { self.share(blocks); }); })
      .def("free", [](BlockPool& self, const Blocks& blocks) { checked([&] { self.free(blocks); }); })
      .def("sort_unused", &BlockPool::sort_unused)
      .def("set_key", [](BlockPool& self, int32_t block,
                         const nb::bytes& key) { return checked([&] { return self.set_key(block, only_key(key)); }); })
      .def("drop_key", [](BlockPool& self, int32_t block) { checked([&] { self.drop_key(block); }); })
      .def("key_of",
           [](const BlockPool& self, int32_t block) -> nb::object {
             return checked([&]() -> nb::object {
               return self.has_key(block) ? nb::object(bytes_of(self.key(block))) : nb::none();
             });
           })
      .def("find", &find)
      .def("unused", [](const BlockPool& self) { return self.unused(); })
      .def("kept", &BlockPool::kept)
      .def("error", &BlockPool::error);
}

}  // namespace llmopt
