// Batch-invariant mode: a row has the same bits in every batch, see docs/batch-invariance.md.
#pragma once

#include <strings.h>

#include <cstdlib>
#include <initializer_list>

namespace flashinfer {

// Return true if FLASHINFER_BATCH_INVARIANT selects the mode. Python checks its text.
inline bool batch_invariant() {
  const char* const text = std::getenv("FLASHINFER_BATCH_INVARIANT");
  if (text == nullptr) return false;
  for (const char* word : {"1", "true", "yes", "on"})
    if (strcasecmp(text, word) == 0) return true;
  return false;
}

}  // namespace flashinfer
