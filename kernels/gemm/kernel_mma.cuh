// The portable GEMM: which tiles and k-blocks a CTA computes, and which rows of the operands it copies.
//
// Tiles are scheduled by Stream-K (persistent/stream_k.cuh): the first `full_tiles` CTAs compute one tile each, the others are workers.
//
// Operands are copied row by row, so any weight row can be loaded into any column of a tile. SwiGLU interleaves eight gate columns with the
// eight up columns that belong to them. Half-split RoPE interleaves eight elements with the eight that are 64 further. One thread then
// holds both members of each pair in registers. Weights in memory stay as the checkpoint has them.
#pragma once

#include <gemm/epilogue_mma.cuh>
#include <persistent/stream_k.cuh>

namespace kl::gemm::portable {
using namespace persistent;

// The operand rows that a thread copies: every kRowsPerCopy-th or, if columns are interleaved in pairs, every half as many. Rows past the
// end repeat the last one; their results are not stored.
template <class Tile>
struct OperandRows {
  uint64_t base;                // the same for all threads, which saves registers
  uint32_t offset, step, last;  // in chunks of sixteen bytes

  __device__ __forceinline__ const typename Tile::Element* at(int i, uint32_t k) const {
    return reinterpret_cast<const typename Tile::Element*>(base) + static_cast<uint64_t>(min(offset + i * step, last) + k / Tile::kChunk) * Tile::kChunk;
  }
};

// The coordinates of a tile from its linear index.
struct TileCoord {
  const KlGemmStream& s;
  uint32_t row_tile, col_tile, part_index;

  __device__ __forceinline__ TileCoord(const KlGemm& p, uint32_t index)
      : s(p.stream[index >= p.stream[0].row_tiles * p.stream[0].col_tiles]) {
    // Row tiles vary fastest: CTAs that run at the same time share weight rows, and x stays in L2.
    if (&s != &p.stream[0]) index -= p.stream[0].row_tiles * p.stream[0].col_tiles;
    row_tile = index % s.row_tiles, col_tile = index / s.row_tiles, part_index = 0;
    while (col_tile >= s.part[part_index].tiles) col_tile -= s.part[part_index++].tiles;
  }

  __device__ __forceinline__ const KlOutputRange& part() const { return s.part[part_index]; }
};

// Accumulates `k_blocks` k-blocks of a tile, from `first_k_block` on.
template <class Tile>
__device__ __forceinline__ void compute(const KlGemm& p, Tile& tile, unsigned char* shared, uint32_t index, uint32_t first_k_block,
                                        uint32_t k_blocks) {
  const TileCoord at(p, index);
  const KlGemmStream& s = at.s;
  const KlOutputRange& part = at.part();
  const auto pitch = [](const KlMat& m) { return static_cast<uint32_t>(m.stride) / Tile::kChunk; };
  const uint32_t line = Tile::copy_row(), chunk = Tile::copy_chunk(), x_pitch = pitch(s.x);
  const OperandRows<Tile> a{s.x.data, (at.row_tile * Tile::kBlockM + line) * x_pitch + chunk, Tile::kRowsPerCopy * x_pitch,
                            (s.x.rows - 1) * x_pitch + chunk};
  // The first weight row that the thread copies, counted from the first row of the part.
  uint32_t row = at.col_tile * Tile::kBlockN + line, step = Tile::kRowsPerCopy;
  const auto address = [&](uint32_t half) {
    const KlGemmRows& rows = part.w[half];
    return reinterpret_cast<uint64_t>(row_of<const typename Tile::Element>(s.w[rows.matrix], rows.first));
  };
  const KlMat& w = s.w[part.w[0].matrix];
  uint64_t base = address(0);
  uint32_t to_half = 0;
  if (part.epilogue == KL_SWIGLU) {
    // A thread copies gate rows or up rows. Up rows may be in another matrix, with the same pitch.
    const uint64_t own = line / 8 % 2 ? address(1) : base;
    base = min(base, address(1));
    to_half = static_cast<uint32_t>((own - base) / 16);
    row = at.col_tile * (Tile::kBlockN / 2) + interleaved_column(line, 0), step = Tile::kRowsPerCopy / 2;
  } else if (part.epilogue == KL_QK_NORM_ROPE && s.rope == KL_ROPE_HALF_SPLIT) {
    row = at.col_tile * Tile::kBlockN + interleaved_column(line, 64), step = Tile::kRowsPerCopy / 2;
  }
  const uint32_t w_pitch = pitch(w), first = to_half + chunk;
  const OperandRows<Tile> b{base, row * w_pitch + first, step * w_pitch, (part.out.cols - 1) * w_pitch + first};
  tile.mainloop(
      shared, s.x.cols, first_k_block, min(k_blocks, ceil_div(s.x.cols, static_cast<uint32_t>(Tile::kBlockK))),
      [&](int i, uint32_t k, bool&) { return a.at(i, k); }, [&](int i, uint32_t k, bool&) { return b.at(i, k); });
}

template <class Tile>
__device__ __forceinline__ void finish_tile(const KlGemm& p, Tile& tile, unsigned char* shared, uint32_t index) {
  const TileCoord at(p, index);
  finish_gemm_tile(at.s, at.part(), p.saturated, tile, shared, at.row_tile, at.col_tile);
}

template <class Tile>
__device__ __forceinline__ void gemm(const KlGemm& p, unsigned char* shared) {
  const KlTileSchedule& s = p.schedule;
  // The first of a CTA's k-blocks, counted over all tiles.
  const auto begin_of = [&](uint32_t cta) { return cta < s.full_tiles ? cta * s.k_blocks : first_k_block(s, cta - s.full_tiles); };
  // The CTA works from their end to their beginning.
  uint32_t end = blockIdx.x < s.full_tiles ? (blockIdx.x + 1) * s.k_blocks : first_k_block(s, blockIdx.x - s.full_tiles + 1);
  for (;;) {
    Tile tile;
    {
      uint32_t start = end;
      const WorkTile work = take_last_tile(s, begin_of(blockIdx.x), start);
      compute(p, tile, shared, work.tile, work.k_begin, end - start);
    }
    // Everything below is derived from these again. Otherwise the compiler would keep it in registers that the main loop needs.
    const uint32_t cta = blockIdx.x;
    asm volatile("" : "+r"(end));
    const WorkTile work = take_last_tile(s, begin_of(cta), end);
    const uint32_t worker = cta - s.full_tiles;
    using Partials = PartialTile<PartialsOfCta<Tile::kThreads>, Tile::kMmaM * Tile::kMmaN>;
    const auto acc = [&](int i) { return tile.acc[i / Tile::kMmaN][i % Tile::kMmaN]; };
    finish_or_store(
        s, work, worker, [&] { Partials(s, {worker}).store_acc(acc); },
        [&](uint32_t peer) { Partials(s, {peer}).template add_to</*in flight*/ 1>(acc); }, [&] { finish_tile(p, tile, shared, work.tile); });
    if (end <= begin_of(cta)) return;
    __syncthreads();  // the staged output has left shared memory
  }
}
}  // namespace kl::gemm::portable
