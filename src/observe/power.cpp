// SPDX-License-Identifier: Apache-2.0
#include "observe/power.h"

#include <dlfcn.h>
#include <utility>

namespace farspan {
namespace {

// The part of NVML's interface that is used here, after NVIDIA's NVML API reference. 0 means success.
class Nvml {
 public:
  using Gpu = void*;

  static const Nvml& instance() {
    static const Nvml nvml;
    return nvml;
  }

  Gpu gpu(const char* bus_id) const {
    Gpu gpu = nullptr;
    return by_bus_id_ != nullptr && by_bus_id_(bus_id, &gpu) == 0 ? gpu : nullptr;
  }
  std::optional<double> joules(Gpu gpu) const {
    unsigned long long millijoules = 0;
    if (energy_ == nullptr || energy_(gpu, &millijoules) != 0) return std::nullopt;
    return static_cast<double>(millijoules) * 1e-3;
  }
  std::optional<double> watts(Gpu gpu) const {
    unsigned milliwatts = 0;
    if (power_ == nullptr || power_(gpu, &milliwatts) != 0) return std::nullopt;
    return milliwatts * 1e-3;
  }
  std::optional<double> sm_clock(Gpu gpu) const {
    unsigned megahertz = 0;
    if (clock_ == nullptr || clock_(gpu, kSmClock, &megahertz) != 0) return std::nullopt;
    return megahertz * 1e6;
  }

 private:
  static constexpr int kSmClock = 1;  // NVML_CLOCK_SM

  // The library is initialised once and kept until the process ends.
  Nvml() {
    void* library = dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) return;
    const auto find = [&]<typename Function>(Function*& function, const char* name) {
      function = reinterpret_cast<Function*>(dlsym(library, name));
    };
    int (*initialise)() = nullptr;
    find(initialise, "nvmlInit_v2");
    if (initialise == nullptr || initialise() != 0) return;
    find(by_bus_id_, "nvmlDeviceGetHandleByPciBusId_v2");
    find(energy_, "nvmlDeviceGetTotalEnergyConsumption");
    find(power_, "nvmlDeviceGetPowerUsage");
    find(clock_, "nvmlDeviceGetClockInfo");
  }

  int (*by_bus_id_)(const char* bus_id, Gpu* gpu) = nullptr;
  int (*energy_)(Gpu gpu, unsigned long long* millijoules) = nullptr;
  int (*power_)(Gpu gpu, unsigned* milliwatts) = nullptr;
  int (*clock_)(Gpu gpu, int type, unsigned* megahertz) = nullptr;
};

}  // namespace

EnergyMeter::EnergyMeter(const std::string& bus_id) {
  if (!bus_id.empty()) gpu_ = Nvml::instance().gpu(bus_id.c_str());
  last_ = joules();
}

std::optional<double> EnergyMeter::joules_since_last() {
  const std::optional<double> now = joules();
  const std::optional<double> before = std::exchange(last_, now);
  if (!now || !before) return std::nullopt;
  return *now - *before;
}

std::optional<PowerReading> EnergyMeter::reading() const {
  if (gpu_ == nullptr) return std::nullopt;
  const std::optional<double> watts = Nvml::instance().watts(gpu_);
  const std::optional<double> clock = Nvml::instance().sm_clock(gpu_);
  if (!watts || !clock) return std::nullopt;
  return PowerReading{.watts = *watts, .sm_clock = *clock};
}

std::optional<double> EnergyMeter::joules() const {
  if (gpu_ == nullptr) return std::nullopt;
  return Nvml::instance().joules(gpu_);
}

}  // namespace farspan
