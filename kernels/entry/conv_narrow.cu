// The 3x3 convolutions at the ends of the VAE, on tensor cores, portable (sm_80 and newer).
//
//   kl_norm_conv_narrow   group norm, SiLU and a convolution to at most three channels: the decoder's last layer, 128 to 3
//   kl_conv_narrow_in     a convolution of at most three channels, + bias: the encoder's first layer, 3 to 128
//
// Bound: HBM, 268 MB each at 1024x1024: reading or writing 128 channels.
// Needs: bf16 (except the result of the first), runs of 32 channels at 16-byte addresses on the wide side, at most KL_NARROW_CHANNELS of
// them if they are normalized.
//
// kl_norm_conv_narrow: with three outputs a GEMM of the usual form would be padded to eight columns, and would read each pixel nine times
// from shared memory. Here every pixel is multiplied by all nine taps at once, which are 27 columns of 32, and the results are added up
// where they belong: out(y, x) is the sum of products(y + dy, x + dx) of tap (dy, dx). So an input pixel is read once, from global memory
// to the registers of its MMA, and normalized on the way. Only 27 f32 of it go through shared memory. A CTA walks down a strip of the
// image, a row of kCols pixels to each warp at a time; outputs are two columns narrower. Warps keep the products of their row in a ring of
// rows, whose last two are needed again with the next rows.
//
// The order of K is free, as long as both operands agree. So a lane takes eight adjacent channels, 16 bytes, of a run of 32 for two MMAs.
// Elements 0, 1 and 2, 3 are its two pairs of the first MMA, 4, 5 and 6, 7 its pairs of the second.
#include <common/math.cuh>
#include <common/types.cuh>
#include <common/vectors.cuh>
#include <conv/geometry.cuh>
#include <ptx/entry.cuh>
#include <ptx/sm80.cuh>

using namespace kl::conv;

KL_DYNAMIC_SHARED(128);

constexpr uint32_t kRun = 32;   // channels that a quad of lanes loads at once
constexpr uint32_t kCols = KL_NARROW_COLS, kWarps = KL_NARROW_THREADS / 32, kTiles = kCols / 16;
constexpr uint32_t kOutputs = KL_NARROW_OUTPUTS, kProducts = 9 * kOutputs, kColumnTiles = 4;
constexpr uint32_t kRing = kWarps + 2;
// Products are stored by column, then pixel. The lanes of a quad have every second column, and this pitch puts them eight banks apart.
constexpr uint32_t kPitch = kCols + 4;
static_assert(kProducts <= 8 * kColumnTiles && 2 * kPitch % 32 == 8);

// Filters are [product][channel] in rows of an odd number of 64 bytes: two rows of a run of channels then have no bank in common.
__host__ __device__ constexpr uint32_t filter_pitch(uint32_t channels) { return channels * 2 | 64; }

struct NarrowShared {
  float products[kRing][kProducts][kPitch];
  alignas(16) float2 norm[KL_NARROW_CHANNELS];  // factor and offset of each channel
  alignas(16) unsigned char filters[8 * kColumnTiles * filter_pitch(KL_NARROW_CHANNELS)];
};
static_assert(sizeof(NarrowShared) == KL_NARROW_SHARED);

// SiLU of two values with one division: the denominators of a / (1 + e^-a) and b / (1 + e^-b) are multiplied. Otherwise the MUFU, which has
// both the exponential and the reciprocal, would take longer than the memory. The exponents are capped so that the product is finite: below
// -40 a value is multiplied by 4e-18.
__device__ __forceinline__ uint32_t silu_pair(float a, float b) {
  constexpr float kLog2E = 1.4426950408889634f, kCap = 58.0f;
  const float c = 1.0f + exp2_approx(fminf(-kLog2E * a, kCap)), d = 1.0f + exp2_approx(fminf(-kLog2E * b, kCap));
  const float inverse = __fdividef(1.0f, c * d);
  return pack_bf16(a * d * inverse, b * c * inverse);
}

__device__ __forceinline__ bool is_inside(int32_t at, uint32_t size) { return at >= 0 && at < static_cast<int32_t>(size); }

KL_ENTRY(kl_norm_conv_narrow, KlNormConv, KL_NARROW_THREADS, 3) {
  NarrowShared& shared = *reinterpret_cast<NarrowShared*>(dynamic_shared);
  const uint32_t channels = p.x.cols, runs = channels / kRun, pitch = filter_pitch(channels);
  const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, quad = lane / 4, quad_lane = lane % 4;
  const uint32_t col_strips = ceil_div(p.width, kCols - 2);
  const uint32_t x0 = blockIdx.x % col_strips * (kCols - 2), y0 = blockIdx.x / col_strips * p.strip_rows;

  // Rows of the strip begin one above its outputs, and their pixels one to the left. The row of this warp goes down kWarps at a time. A
  // lane loads every eighth pixel of the row; `columns` has a bit for each of them that is inside the image.
  int32_t y = static_cast<int32_t>(y0 + warp) - 1;
  const int32_t stride = p.x.stride, end = min(y0 + p.strip_rows + 1, p.height), left = static_cast<int32_t>(x0 + quad) - 1;
  uint32_t columns = 0;
#pragma unroll
  for (int i = 0; i < static_cast<int>(2 * kTiles); i++) columns |= static_cast<uint32_t>(is_inside(left + 8 * i, p.width)) << i;
  // From here on, the loads of a run of channels are issued one run ahead.
  const bf16* from = row_of<const bf16>(p.x, 0) + (static_cast<int64_t>(y) * static_cast<int32_t>(p.width) + left) * stride +
                     static_cast<int32_t>(quad_lane * 8);
  uint4 ahead[kTiles][2] = {};
  const auto fetch = [&](uint32_t tile, int32_t row) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int i = tile * 2 + half;
      if (is_inside(row, end) && columns >> i & 1) ahead[tile][half] = load_now(from + 8 * i * stride);
    }
  };
#pragma unroll
  for (uint32_t tile = 0; tile < kTiles; tile++) fetch(tile, y);

  for (uint32_t c = threadIdx.x; c < channels; c += KL_NARROW_THREADS) {
    const uint32_t group = c / (channels / p.stats.rows);
    const float scale = load<float>(p.gain, 0, c) * rsqrtf(load<float>(p.stats, group, 1) + p.eps);
    // The mean is part of the offset. The cancellation costs less than the rounding of the input to bf16.
    shared.norm[c] = make_float2(scale, load<float>(p.shift, 0, c) - load<float>(p.stats, group, 0) * scale);
  }
  for (uint32_t i = threadIdx.x; i < 8 * kColumnTiles * channels / 8; i += KL_NARROW_THREADS) {
    const uint32_t product = i / (channels / 8), c = i % (channels / 8) * 8, tap = product / kOutputs, output = product % kOutputs;
    const bool exists = tap < 9 && output < p.out.cols;
    const uint4 filter = exists ? *reinterpret_cast<const uint4*>(row_of<const bf16>(p.w, output) + tap * channels + c) : uint4{};
    *reinterpret_cast<uint4*>(shared.filters + product * pitch + c * 2) = filter;
  }
  __syncthreads();

  // All warps take the same number of steps: the last rows of some are below the strip.
  for (uint32_t row = warp; row < p.strip_rows + 2; row += kWarps, y += kWarps) {
    float acc[kTiles][kColumnTiles][4] = {};
#pragma unroll 1
    for (uint32_t run = 0; run < runs; run++) {
      const bool last = run + 1 == runs;
      const int32_t next = last ? y + static_cast<int32_t>(kWarps) : y;
      from += last ? static_cast<int64_t>(kWarps * p.width) * stride - static_cast<int32_t>((runs - 1) * kRun) : kRun;
      float4 norm[4];  // two channels each
      uint4 b[kColumnTiles];
#pragma unroll
      for (int i = 0; i < 4; i++) norm[i] = reinterpret_cast<const float4*>(shared.norm + run * kRun + quad_lane * 8)[i];
#pragma unroll
      for (uint32_t n = 0; n < kColumnTiles; n++) {
        b[n] = *reinterpret_cast<const uint4*>(shared.filters + (n * 8 + quad) * pitch + run * kRun * 2 + quad_lane * 16);
      }
#pragma unroll
      for (uint32_t tile = 0; tile < kTiles; tile++) {
        uint32_t a[2][4];  // of each MMA: rows `quad` and eight below of its first pair of channels, then of its second
#pragma unroll
        for (int half = 0; half < 2; half++) {
          float v[kVector];
          unpack_bf16(ahead[tile][half], v);
#pragma unroll
          for (int i = 0; i < 4; i++) {
            a[i / 2][i % 2 * 2 + half] = silu_pair(v[2 * i] * norm[i].x + norm[i].y, v[2 * i + 1] * norm[i].z + norm[i].w);
          }
        }
        // The loads replace the values that were just used. Otherwise the compiler would issue the loads of all tiles first, and registers
        // would run out.
        asm volatile("" : "+r"(a[0][0]), "+r"(a[0][1]), "+r"(a[0][2]), "+r"(a[0][3])
                     : "r"(a[1][0]), "r"(a[1][1]), "r"(a[1][2]), "r"(a[1][3]));
        fetch(tile, next);
#pragma unroll
        for (uint32_t n = 0; n < kColumnTiles; n++) {
          mma(acc[tile][n], a[0], b[n].x, b[n].y);
          mma(acc[tile][n], a[1], b[n].z, b[n].w);
        }
      }
    }
    auto& own = shared.products[row % kRing];
#pragma unroll
    for (uint32_t tile = 0; tile < kTiles; tile++) {
#pragma unroll
      for (int e = 0; e < 4; e++) {
        const uint32_t pixel = tile * 16 + e / 2 * 8 + quad;
        // Padding applies to the normalized image: pixels outside contribute nothing.
        const bool exists = is_inside(y, p.height) && columns >> (tile * 2 + e / 2) & 1;
#pragma unroll
        for (uint32_t n = 0; n < kColumnTiles; n++) {
          const uint32_t product = n * 8 + quad_lane * 2 + e % 2;
          if (product < kProducts) own[product][pixel] = exists ? acc[tile][n][e] : 0.0f;
        }
      }
    }
    __syncthreads();
    // With these rows, outputs are complete up to one row above the last of them. This warp adds up the outputs of the row above its own.
    if (row >= 2 && y - 1 < static_cast<int32_t>(p.height)) {
#pragma unroll 1
      for (uint32_t col = lane; col < kCols; col += 32) {
        const uint32_t x = x0 + col;
        if (col >= kCols - 2 || x >= p.width) continue;
        for (uint32_t output = 0; output < p.out.cols; output++) {
          float sum = load<float>(p.bias, 0, output);
#pragma unroll
          for (uint32_t tap = 0; tap < 9; tap++) {
            sum += shared.products[(row - 2 + tap / 3) % kRing][tap * kOutputs + output][col + tap % 3];
          }
          store_any(p.out, static_cast<uint64_t>(y - 1) * p.width + x, output, sum);
        }
      }
    }
    __syncthreads();  // the next step overwrites rows that were read here
  }
}

// A warp computes all output channels of 32 pixels at a time. K is the taps by the channels of a pixel, 27 of 32; lanes gather their part
// of it through L1. Output channels are assigned to columns of the MMAs so that a lane has eight adjacent ones.
KL_ENTRY(kl_conv_narrow_in, KlConv, KL_NARROW_IN_THREADS, 2) {
  KL_SHARED_ALIGNED(16, bf16, filters, [KL_NARROW_IN_OUTPUTS * kRun]);
  constexpr uint32_t kPixels = KL_NARROW_IN_THREADS;  // 32 per warp
  const uint32_t channels = p.x.cols, k_size = 9 * channels, outputs = p.out.cols;
  const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, quad = lane / 4, quad_lane = lane % 4;
  for (uint32_t i = threadIdx.x; i < outputs * kRun; i += KL_NARROW_IN_THREADS) {
    filters[i] = i % kRun < k_size ? row_of<const bf16>(p.w, i / kRun)[i % kRun] : from_float<bf16>(0.0f);
  }
  // The eight elements of K that the lane gathers: their offset from the center, and the bits of the filter rows (0 to 2) and columns (3 to
  // 5) that have to be inside the image. Elements past K need a bit that no pixel has.
  int32_t offset[kVector];
  uint32_t needed[kVector];
#pragma unroll
  for (uint32_t e = 0; e < kVector; e++) {
    const uint32_t k = quad_lane * kVector + e, tap = k / channels, row = tap / 3, col = tap % 3;
    offset[e] = ((static_cast<int32_t>(row) - 1) * static_cast<int32_t>(p.width) + static_cast<int32_t>(col) - 1) *
                    static_cast<int32_t>(p.x.stride) + static_cast<int32_t>(k - tap * channels);
    needed[e] = k < k_size ? 1u << row | 8u << col : 64u;
  }
  __syncthreads();
  const auto gather = [&](uint32_t pixel, uint32_t (&pairs)[4]) {
    const uint32_t y = pixel / p.width, x = pixel % p.width;
    uint32_t bits = 0;
#pragma unroll
    for (uint32_t tap = 0; tap < 3; tap++) {
      bits |= static_cast<uint32_t>(is_inside(conv_source(KL_SAME, y, 0, tap), p.height)) << tap;
      bits |= static_cast<uint32_t>(is_inside(conv_source(KL_SAME, x, 0, tap), p.width)) << (3 + tap);
    }
    if (pixel >= p.out.rows) bits = 0;
    const int64_t center = static_cast<int64_t>(pixel) * static_cast<int64_t>(p.x.stride);
    float v[kVector];
#pragma unroll
    for (int e = 0; e < kVector; e++) {
      v[e] = (bits & needed[e]) == needed[e] ? to_float(row_of<const bf16>(p.x, 0)[center + offset[e]]) : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < 4; i++) pairs[i] = pack_bf16(v[2 * i], v[2 * i + 1]);
  };
  const uint32_t tiles = ceil_div(p.out.rows, kPixels);
  for (uint32_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const uint32_t pixel0 = tile * kPixels + warp * 32 + quad;  // and 8, 16 and 24 further
    uint32_t a[2][2][4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      uint32_t pairs[4];
      gather(pixel0 + 8 * i, pairs);
#pragma unroll
      for (int j = 0; j < 4; j++) a[i / 2][j / 2][j % 2 * 2 + i % 2] = pairs[j];
    }
    for (uint32_t first = 0; first < outputs; first += kRun) {
      float acc[2][4][4];
#pragma unroll
      for (uint32_t n = 0; n < 4; n++) {
        // The channel of column `quad` of MMA n. The lane's own columns are channels 2 n and 2 n + 1 of its eight.
        const uint32_t channel = first + quad / 2 * 8 + n * 2 + quad % 2;
        const uint4 b = *reinterpret_cast<const uint4*>(filters + channel * kRun + quad_lane * kVector);
        const float2 bias = load_pair(row_of<const float>(p.bias, 0) + first + quad_lane * 8 + n * 2);
#pragma unroll
        for (int m = 0; m < 2; m++) {
          acc[m][n][0] = acc[m][n][2] = bias.x, acc[m][n][1] = acc[m][n][3] = bias.y;
          mma(acc[m][n], a[m][0], b.x, b.y);
          mma(acc[m][n], a[m][1], b.z, b.w);
        }
      }
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const uint32_t pixel = pixel0 + 8 * i;
        if (pixel >= p.out.rows) continue;
        const auto& of = acc[i / 2];
        const int e = i % 2 * 2;
        const float v[kVector] = {of[0][e], of[0][e + 1], of[1][e], of[1][e + 1], of[2][e], of[2][e + 1], of[3][e], of[3][e + 1]};
        store_vector(row_of<bf16>(p.out, pixel) + first + quad_lane * 8, v);
      }
    }
  }
}
