// SPDX-License-Identifier: Apache-2.0
#include "train/agreement.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <string_view>
#include <vector>

#include "base/error.h"
#include "base/philox.h"
#include "config/keys.h"

namespace farspan {
namespace {

// A value as it travels: its hash tells whether two are equal, its first characters what they are.
struct Entry {
  uint64_t hash = 0;
  std::array<char, 56> text{};

  explicit Entry(std::string_view value) : hash(name_hash(value)) {
    std::copy_n(value.begin(), std::min(value.size(), text.size() - 1), text.begin());
  }
  Entry() = default;
};
static_assert(std::is_trivially_copyable_v<Entry>);

constexpr std::string_view kData = "data";

}  // namespace

void check_agreement(Communicator& world, const Config& config, const std::string& data_identity) {
  std::vector<std::string> names;
  std::vector<Entry> own;
  for (const Key& key : config_keys()) {
    names.push_back(key.path());
    own.emplace_back(key.write(config));
  }
  names.emplace_back(kData);
  own.emplace_back(data_identity);

  std::vector<Entry> all(own.size() * static_cast<size_t>(world.size()));
  const auto bytes = [](std::vector<Entry>& entries) {
    return Tensor(entries.data(), DType::u8, {std::ssize(entries) * static_cast<int64_t>(sizeof(Entry))});
  };
  world.all_gather(bytes(own), bytes(all), "settings").wait();
  for (size_t i = 0; i < names.size(); ++i) {
    for (int rank = 1; rank < world.size(); ++rank) {
      const Entry& other = all[static_cast<size_t>(rank) * own.size() + i];
      if (other.hash == all[i].hash) continue;
      if (names[i] == kData)
        throw DataError(fmt::format("rank 0 and rank {} read different data ({} and {}); give all the same files", rank,
                                    all[i].text.data(), other.text.data()));
      throw ConfigError(fmt::format("{} is {} on rank 0 and {} on rank {}; start all ranks with the same settings",
                                    names[i], all[i].text.data(), other.text.data(), rank));
    }
  }
}

}  // namespace farspan
