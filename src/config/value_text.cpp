// SPDX-License-Identifier: Apache-2.0
#include "config/value_text.h"

#include <charconv>
#include <cmath>
#include <cstdlib>
#include <fmt/format.h>
#include <utility>

namespace farspan {
namespace {

constexpr int64_t kLargestExponent = 1000;  // past the range of doubles; keeps exponent sums small

bool is_digit(char c) { return c >= '0' && c <= '9'; }

// A decimal number taken apart: (-1)^negative * 0.digits... without the point: digits * 10^exponent.
struct Decimal {
  bool negative = false;
  std::string digits;    // integer and fraction digits together
  int64_t exponent = 0;  // of the last digit
};

// Takes digits from the front; an underscore may stand between two digits.
std::string take_digits(std::string_view& text) {
  std::string digits;
  while (!text.empty()) {
    const bool separator = text[0] == '_' && !digits.empty() && text.size() > 1 && is_digit(text[1]);
    if (!is_digit(text[0]) && !separator) break;
    if (!separator) digits += text[0];
    text.remove_prefix(1);
  }
  return digits;
}

bool take_sign(std::string_view& text) {
  if (text.empty() || (text[0] != '-' && text[0] != '+')) return false;
  const bool negative = text[0] == '-';
  text.remove_prefix(1);
  return negative;
}

// False when `text` is not [sign] digits [. digits] [e [sign] digits] as a whole.
bool take_apart(std::string_view text, Decimal& number) {
  number.negative = take_sign(text);
  number.digits = take_digits(text);
  if (!text.empty() && text[0] == '.') {
    text.remove_prefix(1);
    const std::string fraction = take_digits(text);
    number.digits += fraction;
    number.exponent = -static_cast<int64_t>(fraction.size());
  }
  if (number.digits.empty()) return false;
  if (!text.empty() && (text[0] == 'e' || text[0] == 'E')) {
    text.remove_prefix(1);
    const bool negative = take_sign(text);
    const std::string digits = take_digits(text);
    int64_t power = 0;
    for (char c : digits) power = std::min(power * 10 + (c - '0'), 2 * kLargestExponent);
    if (digits.empty()) return false;
    number.exponent += negative ? -power : power;
  }
  return text.empty();
}

[[noreturn]] void expected(std::string_view what, std::string_view found) {
  throw ValueError(fmt::format("expected {}, found \"{}\"", what, found));
}

}  // namespace

int64_t read_integer(std::string_view text) {
  constexpr std::string_view kWhat = "an integer such as 1024, 1_024 or 1e3";
  Decimal number;
  if (!take_apart(text, number)) expected(kWhat, text);

  std::string& digits = number.digits;
  digits.erase(0, std::min(digits.find_first_not_of('0'), digits.size()));
  if (digits.empty()) return 0;
  for (; number.exponent < 0; ++number.exponent) {
    if (digits.empty() || digits.back() != '0') expected(kWhat, text);
    digits.pop_back();
  }
  constexpr size_t kDigitsOfInt64 = 19;
  if (digits.size() + static_cast<size_t>(number.exponent) > kDigitsOfInt64)
    expected("an integer of at most 64 bits", text);
  digits.append(static_cast<size_t>(number.exponent), '0');
  if (number.negative) digits.insert(0, 1, '-');

  int64_t value = 0;
  const auto result = std::from_chars(digits.data(), digits.data() + digits.size(), value);
  if (result.ec != std::errc()) expected("an integer of at most 64 bits", text);
  return value;
}

int64_t read_bytes(std::string_view text) {
  constexpr std::pair<std::string_view, int64_t> kUnits[] = {{"KiB", int64_t{1} << 10},
                                                             {"MiB", int64_t{1} << 20},
                                                             {"GiB", int64_t{1} << 30},
                                                             {"TiB", int64_t{1} << 40},
                                                             {"KB", 1'000},
                                                             {"MB", 1'000'000},
                                                             {"GB", 1'000'000'000},
                                                             {"TB", 1'000'000'000'000}};
  const char last = text.empty() ? '0' : text.back();
  if (!is_digit(last) && last != 'B') expected("bytes such as 1073741824, 512MiB or 16GB", text);
  for (const auto& [unit, bytes_of_unit] : kUnits) {
    if (!text.ends_with(unit)) continue;
    std::string_view count = text.substr(0, text.size() - unit.size());
    while (!count.empty() && count.back() == ' ') count.remove_suffix(1);
    int64_t bytes = 0;
    if (__builtin_mul_overflow(read_integer(count), bytes_of_unit, &bytes)) expected("bytes within 64 bits", text);
    return bytes;
  }
  return read_integer(text);
}

double read_real(std::string_view text) {
  Decimal number;
  if (!take_apart(text, number)) expected("a number such as 0.00002 or 2e-5", text);
  const std::string plain = fmt::format("{}{}e{}", number.negative ? "-" : "", number.digits, number.exponent);
  double value = 0;
  const auto result = std::from_chars(plain.data(), plain.data() + plain.size(), value);
  if (result.ec != std::errc() || !std::isfinite(value)) expected("a number that a 64-bit float can hold", text);
  return value;
}

bool read_boolean(std::string_view text) {
  if (text == "true") return true;
  if (text == "false") return false;
  expected("true or false", text);
}

std::vector<std::string> split_commas(std::string_view text) {
  std::vector<std::string> parts;
  while (!text.empty()) {
    const size_t comma = std::min(text.find(','), text.size());
    std::string_view part = text.substr(0, comma);
    text.remove_prefix(std::min(comma + 1, text.size()));
    while (!part.empty() && part.front() == ' ') part.remove_prefix(1);
    while (!part.empty() && part.back() == ' ') part.remove_suffix(1);
    parts.emplace_back(part);
  }
  return parts;
}

std::string yaml_scalar(std::string_view text) {
  bool plain = !text.empty() && text != "null" && text != "Null" && text != "NULL";
  for (char c : text) {
    const bool letter = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || is_digit(c);
    plain = plain && (letter || c == '.' || c == '_' || c == '/' || c == '+' || c == '-');
  }
  plain = plain && text[0] != '-';
  if (plain) return std::string(text);

  std::string quoted = "\"";
  for (char c : text) {
    const unsigned char byte = static_cast<unsigned char>(c);
    if (c == '"' || c == '\\') {
      quoted += '\\';
      quoted += c;
    } else if (byte < 0x20 || byte == 0x7f) {
      quoted += fmt::format("\\x{:02x}", byte);
    } else {
      quoted += c;
    }
  }
  return quoted + '"';
}

std::string yaml_list(const std::vector<std::string>& items) {
  std::string text = "[";
  for (const std::string& item : items) {
    if (text.size() > 1) text += ", ";
    text += yaml_scalar(item);
  }
  return text + "]";
}

}  // namespace farspan
