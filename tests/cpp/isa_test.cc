#include "llmopt/isa.h"

#include <gtest/gtest.h>

#include <stdexcept>
#include <string>

namespace llmopt {
namespace {

TEST(Isa, PortableIsAlwaysAvailableAndLast) { EXPECT_EQ(available_isas().back(), Isa::kPortable); }

TEST(Isa, EmptyNameSelectsTheWidestAvailable) { EXPECT_EQ(select_isa(""), available_isas().front()); }

TEST(Isa, EveryAvailableNameSelectsItself) {
  for (Isa isa : available_isas()) EXPECT_EQ(select_isa(name(isa)), isa);
}

TEST(Isa, UnknownNameIsRefusedWithTheChoices) {
  try {
    select_isa("avx3");
    FAIL() << "avx3 was accepted";
  } catch (const std::runtime_error& error) {
    EXPECT_NE(std::string(error.what()).find("avx3"), std::string::npos);
    EXPECT_NE(std::string(error.what()).find("portable"), std::string::npos);
  }
}

}  // namespace
}  // namespace llmopt
