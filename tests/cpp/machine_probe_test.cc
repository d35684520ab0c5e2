// Logic only: that what is measured is really read and computed, and that wrong wishes are refused. Never speed.
#include "llmopt/machine_probe.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <stdexcept>

#include "llmopt/isa.h"

#if defined(__linux__)
#include <sched.h>
#endif

namespace llmopt {
namespace {

constexpr size_t kMegabyte = 1u << 20;

TEST(MachineProbe, EveryWorkingSetAndThreadCountGivesABandwidth) {
  BandwidthProbe probe(3 * kMegabyte + 5, {0, 0});
  for (size_t bytes : {size_t{1024}, kMegabyte, 3 * kMegabyte}) {
    for (int threads : {1, 2}) EXPECT_GT(probe.measure(bytes, threads, 0), 1e6) << bytes << " bytes, " << threads;
  }
}

TEST(MachineProbe, AWorkingSetThatIsNoMultipleOfARoundIsReadAsFarAsRoundsGo) {
  BandwidthProbe probe(kMegabyte, {0, 0, 0});
  EXPECT_GT(probe.measure(kMegabyte - 3, 3, 0), 1e6);
}

TEST(MachineProbe, SizesAndThreadsThatWereNotAnnouncedAreRefused) {
  EXPECT_THROW(BandwidthProbe(0, {0}), std::invalid_argument);
  EXPECT_THROW(BandwidthProbe(kMegabyte, {}), std::invalid_argument);
  BandwidthProbe probe(2 * kMegabyte, {0});
  EXPECT_THROW(probe.measure(3 * kMegabyte, 1, 0), std::invalid_argument);
  EXPECT_THROW(probe.measure(511, 1, 0), std::invalid_argument);
  EXPECT_THROW(probe.measure(kMegabyte, 2, 0), std::invalid_argument);
  EXPECT_THROW(probe.measure(kMegabyte, 0, 0), std::invalid_argument);
}

TEST(MachineProbe, EveryKindOfTheInstructionSetHasAPeakAndFloat32IsThereAlways) {
  const auto kinds = peak_kinds();
  ASSERT_FALSE(kinds.empty());
  EXPECT_EQ(kinds.front(), "float32");
  for (const auto& kind : kinds) EXPECT_GT(measure_peak(kind, {0, 0}, 0), 1e6) << kind;
}

TEST(MachineProbe, TilesAreMeasuredWithAmxOnly) {
  const auto kinds = peak_kinds();
  const bool has_tiles = std::count(kinds.begin(), kinds.end(), "bfloat16_tile") > 0;
  EXPECT_EQ(has_tiles, selected_isa() == Isa::kAmx);
}

TEST(MachineProbe, AnUnknownKindIsRefusedWithTheChoices) {
  try {
    measure_peak("float128", {0}, 0);
    FAIL() << "float128 was accepted";
  } catch (const std::invalid_argument& error) {
    EXPECT_NE(std::string(error.what()).find("float128"), std::string::npos);
    EXPECT_NE(std::string(error.what()).find("float32"), std::string::npos);
  }
  EXPECT_THROW(measure_peak("float32", {}, 0), std::invalid_argument);
}

TEST(MachineProbe, ACpuThatDoesNotExistIsLeftToTheSystem) {
  BandwidthProbe probe(kMegabyte, {1000000, -1});
  EXPECT_GT(probe.measure(kMegabyte, 2, 0), 1e6);
}

#if defined(__linux__)
TEST(MachineProbe, TheCallersOwnBindingStays) {
  cpu_set_t before, after;
  sched_getaffinity(0, sizeof(before), &before);
  BandwidthProbe(kMegabyte, {0}).measure(kMegabyte, 1, 0);
  measure_peak("float32", {0}, 0);
  sched_getaffinity(0, sizeof(after), &after);
  EXPECT_TRUE(CPU_EQUAL(&before, &after));
}
#endif

}  // namespace
}  // namespace llmopt
