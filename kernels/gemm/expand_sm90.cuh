// Weights of e4m3 for activations of bf16 (W8A16): the policy of a Hopper GEMM whose operand B is expanded on its way into the pipeline.
//
// Codes arrive in the raw ring as they are in memory. The three warps of the producer warpgroup that have no loads to issue turn them
// into bf16, which is exact, and write them to a stage where TMA would have put rows of bf16.
#pragma once

#include <common/swizzle.cuh>
#include <gemm/config_sm90.cuh>
#include <gemm/policies_sm90.cuh>

// Four codes of e4m3 as two pairs of bf16. None of them is NaN: the host refuses such weights.
__device__ __forceinline__ uint2 e4m3_to_bf16(uint32_t codes) {
  // A code and, above it, its sign eight times: shifted by four, its bits are in the places that they have in bf16, but for the bias of
  // the exponent, which is larger there by 120. This holds for subnormal codes as well, since the product is exact.
  constexpr uint32_t kSignExponentMantissa = 0x87f087f0, kTwoTo120 = 0x7b807b80;
  const auto pair = [](uint32_t extended) { return mul_bf16x2(extended << 4 & kSignExponentMantissa, kTwoTo120); };
  return make_uint2(pair(permute_bytes<0x9180>(codes)), pair(permute_bytes<0xb3a2>(codes)));
}

// B is rows of a weight, of which each half of a tile's columns is e4m3 or bf16. Those of bf16 are loaded as they are.
template <int kRawStages_>
struct ExpandedB {
  static constexpr uint32_t kRawStages = kRawStages_, kRowBytes = 64;  // of the codes of a k-block
  static __host__ __device__ constexpr uint32_t raw_bytes(uint32_t cols) { return cols * kRowBytes; }

  template <class Config>
  struct Loader {
    static_assert(Config::kMode != ClusterMode::kMulticastB, "every CTA expands the rows of its own tile");
    HalfOfB<Config> first, second;

    __device__ __forceinline__ Loader(const KlGemmSm90& p, const TileCoord<Config>& at, uint32_t)
        : first(p, at, 0), second(p, at, 1) {}

    // Bytes that arrive in a stage of the raw ring, and in one of the pipeline.
    __device__ __forceinline__ uint32_t raw_bytes() const { return (first.is_e4m3() + second.is_e4m3()) * (Config::kRawBytes / 2); }
    __device__ __forceinline__ uint32_t tma_bytes() const { return (!first.is_e4m3() + !second.is_e4m3()) * (Config::kBBytes / 2); }

    __device__ __forceinline__ void load_raw(uint32_t k, uint32_t to, uint32_t full) const {
      if (first.is_e4m3()) tma_load_2d(to, first.map, k * Config::kBlockK, first.row, full);
      if (second.is_e4m3()) tma_load_2d(to + Config::kRawBytes / 2, second.map, k * Config::kBlockK, second.row, full);
    }

    __device__ __forceinline__ void load(uint32_t k, uint32_t to, uint32_t full) const {
      if (!first.is_e4m3()) tma_load_2d(to, first.map, k * Config::kBlockK, first.row, full);
      if (!second.is_e4m3()) tma_load_2d(to + Config::kBBytes / 2, second.map, k * Config::kBlockK, second.row, full);
    }
  };

  // What a thread of the writer warps expands of a tile: blocks of sixteen codes. Those of neighbouring threads are beside each other,
  // and both swizzles are such that eight of them, which shared memory serves at a time, are in different banks.
  template <class Config>
  struct Writer {
    static constexpr uint32_t kBlocks = Config::kBlockK / 16, kRowsAtOnce = 32 * Config::kWriterWarps / kBlocks;
    static_assert(Config::kBlockK == kRowBytes && kRowsAtOnce % 8 == 0, "the swizzles of a thread's rows are all the same");
    static_assert(raw_bytes(Config::kBlockN) % kSwizzleAlignment == 0, "the swizzle of a raw stage begins with its first row");
    uint32_t row, end, from, to;  // offsets of the first block

    __device__ __forceinline__ Writer(const KlGemmSm90& p, const TileCoord<Config>& at, uint32_t thread) {
      // Codes are in the first half of the rows, in the second, in both, or nowhere: one range in any case.
      constexpr uint32_t kHalf = Config::kBlockN / 2;
      const uint32_t block = thread % kBlocks;
      row = (HalfOfB<Config>(p, at, 0).is_e4m3() ? 0 : kHalf) + thread / kBlocks;
      end = HalfOfB<Config>(p, at, 1).is_e4m3() ? Config::kBlockN : kHalf;
      from = swizzled<kRowBytes>(row, block), to = swizzled<kSwizzleRowBytes>(row, 2 * block);
    }

    // Expands a k-block at `raw` into the rows of B at `stage`.
    __device__ __forceinline__ void expand(uint32_t stage, uint32_t raw) const {
      constexpr uint32_t kInFlight = 2;  // loads, because the producer has few registers
      raw += from, stage += to;
      for (uint32_t i = row; i < end; i += kInFlight * kRowsAtOnce) {
        uint4 codes[kInFlight];
#pragma unroll
        for (uint32_t j = 0; j < kInFlight; j++, raw += kRowsAtOnce * kRowBytes) {
          if (i + j * kRowsAtOnce < end) codes[j] = load_shared_words(raw);
        }
#pragma unroll
        for (uint32_t j = 0; j < kInFlight; j++, stage += kRowsAtOnce * kSwizzleRowBytes) {
          if (i + j * kRowsAtOnce >= end) continue;
          const uint2 a = e4m3_to_bf16(codes[j].x), b = e4m3_to_bf16(codes[j].y);
          const uint2 c = e4m3_to_bf16(codes[j].z), d = e4m3_to_bf16(codes[j].w);
          // The chunks of a block are neighbours but for the swizzle, which keeps them within 32 bytes.
          store_shared(stage, make_uint4(a.x, a.y, b.x, b.y));
          store_shared(stage ^ 16, make_uint4(c.x, c.y, d.x, d.y));
        }
      }
    }
  };
};
