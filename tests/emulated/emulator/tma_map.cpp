#include "tma_map.h"

#include <stdio.h>
#include <string.h>

#include <algorithm>

#include "emulator.h"
#include "runtime.h"

namespace kl_emu {
namespace {

constexpr uint64_t kMark = 0x70616d726f736e65u;
constexpr uint32_t kMapAlignment = 64, kLargestBoxSide = 256;

thread_local char message[256];

}  // namespace

const TensorMap& decode_map(const void* map, uint32_t rank, const char* operation) {
  KL_EMU_CHECK(reinterpret_cast<uintptr_t>(map) % kMapAlignment == 0, "%s: the tensor map is not aligned to %u bytes", operation,
               kMapAlignment);
  const TensorMap& decoded = *static_cast<const TensorMap*>(map);
  KL_EMU_CHECK(decoded.mark == kMark, "%s: these bytes are not an encoded tensor map", operation);
  KL_EMU_CHECK(decoded.rank == rank, "%s: the tensor map has rank %u", operation, decoded.rank);
  return decoded;
}

BoxRow box_row(const TensorMap& map, const int32_t (&origin)[kTmaRank], uint32_t row) {
  const int64_t y = int64_t{origin[1]} + row % map.box[1], z = int64_t{origin[2]} + row / map.box[1];
  if (y < 0 || y >= static_cast<int64_t>(map.size[1]) || z < 0 || z >= static_cast<int64_t>(map.size[2])) return {0, 0, 0};
  const int64_t width = map.box[0], x = origin[0];
  const int64_t first = std::clamp<int64_t>(-x, 0, width), end = std::clamp<int64_t>(static_cast<int64_t>(map.size[0]) - x, first, width);
  const uint64_t offset = y * map.pitch[0] + z * map.pitch[1] + (x + first) * map.element_bytes;
  return {static_cast<uint32_t>(first), static_cast<uint32_t>(end), map.address + offset};
}

}  // namespace kl_emu

// The rules of cuTensorMapEncodeTiled, without interleaving.
extern "C" const char* kl_emu_tensor_map(uint64_t out[16], const KlEmuMap* map) {
  using namespace kl_emu;
  const auto reject = [](const char* rule, uint64_t value) {
    snprintf(message, sizeof(message), "tensor map: %s, not %llu", rule, static_cast<unsigned long long>(value));
    return message;
  };
  if (map->rank < 2 || map->rank > kTmaRank) return reject("the rank is 2 or 3", map->rank);
  const uint32_t bytes = map->element_bytes;
  if (bytes != 1 && bytes != 2 && bytes != 4 && bytes != 8) return reject("elements have 1, 2, 4 or 8 bytes", bytes);
  if (map->address == 0 || map->address % 16) return reject("the address is a multiple of 16", map->address);
  TensorMap encoded = {kMark, map->address, bytes, map->rank, {1, 1, 1}, {0, 0}, {1, 1, 1}, map->swizzle};
  for (uint32_t i = 0; i < map->rank; i++) {
    if (map->size[i] == 0 || map->size[i] > uint64_t{1} << 32) return reject("sizes are 1 to 2^32", map->size[i]);
    if (map->box[i] == 0 || map->box[i] > kLargestBoxSide) return reject("the sides of a box are 1 to 256", map->box[i]);
    encoded.size[i] = map->size[i], encoded.box[i] = map->box[i];
    if (i == 0) continue;
    const uint64_t pitch = map->pitch[i - 1];
    if (pitch % 16 || pitch >= uint64_t{1} << 40) return reject("pitches are multiples of 16 below 2^40", pitch);
    encoded.pitch[i - 1] = pitch;
  }
  if (encoded.row_bytes() % 16) return reject("the rows of a box are a multiple of 16 bytes", encoded.row_bytes());
  if (map->swizzle != 0 && map->swizzle != 32 && map->swizzle != 64 && map->swizzle != 128) {
    return reject("the swizzle is 0, 32, 64 or 128 bytes", map->swizzle);
  }
  if (map->swizzle && encoded.row_bytes() > map->swizzle) return reject("the rows of a box fit the swizzle", encoded.row_bytes());
  memset(out, 0, 16 * sizeof(uint64_t));
  memcpy(out, &encoded, sizeof(encoded));
  return nullptr;
}
