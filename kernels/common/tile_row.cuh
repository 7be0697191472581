// Checks of the rows of tiles.def.
#pragma once

#include <stdint.h>

// Holds a number that a row states to the one that follows from its other columns. If they differ, the compiler's error has both.
template <uint32_t kComputed, uint32_t kStated>
constexpr bool row_states() {
  static_assert(kComputed == kStated, "a row of tiles.def states another number than the one that follows from its other columns");
  return true;
}
