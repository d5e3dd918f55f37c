// A hook for tests: what scratch holds before a call must not matter.
#pragma once

#include <cstdint>

namespace evenkv {

// Fills all scratch of this library, counters excepted, with a byte. Returns null, or what failed.
const char* fill_scratch(int32_t byte);

}  // namespace evenkv
