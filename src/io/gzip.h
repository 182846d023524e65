// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace farspan {

// The whole content of a gzip file (RFC 1952), all its members one after the other, as `cat a.gz b.gz` and bgzip make
// them; zero bytes after the last member are padding. Throws DataError with path and byte offset when the file is cut
// short or corrupt, or when something else follows the last member.
std::vector<uint8_t> read_gzip(const std::string& path);

}  // namespace farspan
