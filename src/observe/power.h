// SPDX-License-Identifier: Apache-2.0
// What a GPU draws, from the driver's own library (NVML), which is looked for while the program runs: where it is
// missing, or the GPU has no such counter, there is no reading and nothing else changes.
#pragma once

#include <optional>
#include <string>

namespace farspan {

struct PowerReading {
  double watts = 0;     // averaged by the driver over a moment
  double sm_clock = 0;  // Hz, of the multiprocessors
};

class EnergyMeter {
 public:
  // `bus_id`: the GPU's, as cuda_bus_id (device/accelerator.h) gives it; empty: no meter.
  explicit EnergyMeter(const std::string& bus_id);

  // Joules that the whole GPU, whoever used it, has taken since the last call, or since the meter was made. The driver
  // brings its counter up to date every few hundredths of a second. None where it cannot be known.
  std::optional<double> joules_since_last();
  std::optional<PowerReading> reading() const;

 private:
  std::optional<double> joules() const;  // of the counter

  void* gpu_ = nullptr;  // the library's handle
  std::optional<double> last_;
};

}  // namespace farspan
