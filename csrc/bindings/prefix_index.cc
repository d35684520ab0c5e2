// The binding of llmopt/prefix_index.h. Keys are bytes, 16 for each, digests 32; token ids are arrays of int64.
#include "llmopt/prefix_index.h"

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "bindings/common.h"

using nb::literals::operator""_a;

namespace llmopt {
namespace {

using Blocks = std::vector<int32_t>;
using Ids = Array1<int64_t>;

std::span<const int64_t> span_of(const Ids& ids) { return {ids.data(), ids.size()}; }

// Items of equal size that lie in bytes one behind the other.
template <class Item>
std::vector<Item> items_of(const nb::bytes& bytes, const char* what) {
  if (bytes.size() % sizeof(Item) != 0) {
    throw nb::value_error((std::string(what) + " have " + std::to_string(sizeof(Item)) + " bytes each, found " +
                           std::to_string(bytes.size()) + " together.")
                              .c_str());
  }
  std::vector<Item> items(bytes.size() / sizeof(Item));
  if (!items.empty()) std::memcpy(items.data(), bytes.data(), bytes.size());
  return items;
}

nb::bytes hash_blocks(const PrefixIndex& self, const nb::bytes& last, const Ids& ids) {
  const auto digests = self.hash_blocks({reinterpret_cast<const uint8_t*>(last.data()), last.size()}, span_of(ids));
  return nb::bytes(reinterpret_cast<const char*>(digests.data()), digests.size() * sizeof(Digest));
}

// A call that the state of the pool does not allow is a mistake in the caller's code.
template <class Call>
auto checked(const Call& call) {
  try {
    return call();
  } catch (const std::invalid_argument& error) {
    throw nb::value_error(error.what());
  } catch (const std::out_of_range&) {
    throw nb::index_error("the pool has no such block");
  } catch (const std::logic_error& error) {
    PyErr_SetString(PyExc_AssertionError, error.what());
    throw nb::python_error();
  }
}

// Views of what the index notes of every block.
using Self = nb::handle_t<PrefixIndex>;

PrefixIndex& index_of(Self self) { return nb::cast<PrefixIndex&>(self); }

template <class Item>
nb::ndarray<nb::numpy, Item> column(Self self, void* data) {
  return {data, {static_cast<size_t>(index_of(self).num_blocks())}, self};
}

template <class Item>
nb::ndarray<nb::numpy, Item> rows(Self self, void* data, size_t width) {
  return {data, {static_cast<size_t>(index_of(self).num_blocks()), width}, self};
}

}  // namespace

void bind_prefix_index(nb::module_& m) {
  nb::class_<PrefixIndex>(m, "PrefixIndex")
      .def(nb::init<BlockPool&, int32_t>(), "pool"_a, "block_size"_a, nb::keep_alive<1, 2>())
      .def_prop_ro("num_collisions", &PrefixIndex::num_collisions)
      .def_prop_ro(
          "tokens",
          [](Self self) { return rows<int32_t>(self, index_of(self).tokens().data(), index_of(self).block_size()); })
      .def_prop_ro("digests",
                   [](Self self) { return rows<uint8_t>(self, index_of(self).digests().data(), sizeof(Digest)); })
      .def_prop_ro("is_durable", [](Self self) { return column<bool>(self, index_of(self).is_durable().data()); })
      .def_prop_ro("serials", [](Self self) { return column<int64_t>(self, index_of(self).serials().data()); })
      .def_prop_ro("parents", [](Self self) { return column<int64_t>(self, index_of(self).parents().data()); })
      .def("new_serial", &PrefixIndex::new_serial)
      .def("hash_blocks", &hash_blocks)
      .def("match",
           [](PrefixIndex& self, int64_t root, const nb::bytes& keys, const Ids& ids) {
             return checked([&] { return self.match(root, items_of<BlockKey>(keys, "keys"), span_of(ids)); });
           })
      .def("match_part", [](const PrefixIndex& self, int64_t serial,
                            const Ids& ids) { return self.match_part(serial, span_of(ids)); })
      .def("enter",
           [](PrefixIndex& self, const Blocks& blocks, const Ids& ids, const nb::bytes& keys, const nb::bytes& digests,
              int64_t serial, bool is_durable) {
             return checked([&] {
               return self.enter(blocks, span_of(ids), items_of<BlockKey>(keys, "keys"),
                                 items_of<Digest>(digests, "digests"), serial, is_durable);
             });
           })
      .def("enter_part",
           [](PrefixIndex& self, int32_t block, const Ids& ids, const nb::bytes& key, int64_t serial) {
             const auto keys = items_of<BlockKey>(key, "keys");
             if (keys.size() != 1) throw nb::value_error("a part of a block has one key.");
             checked([&] { self.enter_part(block, span_of(ids), keys[0], serial); });
           })
      .def("forget", [](PrefixIndex& self, const Blocks& blocks) { checked([&] { self.forget(blocks); }); })
      .def("followers", &PrefixIndex::followers);
}

}  // namespace llmopt
