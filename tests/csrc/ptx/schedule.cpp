#include "schedule.h"

#include <cstdlib>
#include <string_view>

namespace torchrec_dyn::ptx {
namespace {

constexpr uint64_t kMostSteps = 4'000'000'000;

uint64_t number_of(const char* name, uint64_t otherwise) {
  const char* text = std::getenv(name);
  return text == nullptr ? otherwise : std::strtoull(text, nullptr, 0);
}

Schedule schedule_named(std::string_view name, Random& random) {
  if (name == "converged") return Schedule::kConverged;
  if (name == "random") return Schedule::kRandom;
  if (name == "split") return Schedule::kSplit;
  if (name != "mixed")
    report("TORCHREC_DYN_PTX_SCHEDULE: expected converged, random, split or mixed, got " + std::string(name) +
           ". Launches are mixed.");
  return static_cast<Schedule>(random.below(3));
}

}  // namespace

Turns next_turns() {
  static uint64_t launches = 0;  // launches hold a lock
  const uint64_t seed = number_of("TORCHREC_DYN_PTX_SEED", 1);
  // Odd constants of splitmix64: launches and seeds near each other draw other numbers.
  Random random((seed + 1) * 0x9E3779B97F4A7C15u ^ ++launches * 0xD1B54A32D192ED03u);
  random.next();
  const char* name = std::getenv("TORCHREC_DYN_PTX_SCHEDULE");
  const Schedule schedule = schedule_named(name == nullptr ? "mixed" : name, random);
  return {schedule, random, number_of("TORCHREC_DYN_PTX_STEPS", kMostSteps)};
}

}  // namespace torchrec_dyn::ptx
