// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace farspan {

// The token ids one rank holds rows or logits of, when a vocabulary is dealt to several: as many as those operands
// have, from first_id on. May be none.
struct VocabularyPart {
  int64_t first_id = 0;
  int64_t vocabulary = 0;  // ids of all ranks together: [0, vocabulary)
};

}  // namespace farspan
