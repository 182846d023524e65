// SPDX-License-Identifier: Apache-2.0
// Values as text, the same in a file and on the command line. Numbers are read by us and not by the YAML library, whose
// rules would take 2e-5 for a string and drop what follows a number.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace farspan {

// What stands for a key in a file or after a flag: one text, or a list of them.
struct ValueText {
  std::vector<std::string> items;
  bool is_list = false;  // written as a list, even if of one item
};

// A text that is not a value of the wanted kind. what() says what was expected and found; who catches it adds the
// place.
class ValueError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Decimal integer; 1_024 and, where exact, 1e3 or 2.5e3 too. Throws ValueError: anything else, or not in 64 bits.
int64_t read_integer(std::string_view text);

// As read_integer, with an optional unit at the end: KiB, MiB, GiB, TiB (powers of 1024), KB, MB, GB, TB (powers of
// 1000).
int64_t read_bytes(std::string_view text);

// Decimal number with optional fraction and exponent (2e-5, 2.0E-5, 0.00002), rounded to nearest. Throws ValueError:
// anything else, inf and nan, or a size that a double cannot hold.
double read_real(std::string_view text);

// true or false. Throws ValueError: anything else.
bool read_boolean(std::string_view text);

// Parts between commas; spaces around a part are dropped. "" is no part.
std::vector<std::string> split_commas(std::string_view text);

// The text as one YAML scalar: plain where that is safe, else in double quotes.
std::string yaml_scalar(std::string_view text);
// [a, b]
std::string yaml_list(const std::vector<std::string>& items);

}  // namespace farspan
