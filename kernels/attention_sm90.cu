// Attention on Hopper: what kl_attention_mma does, by the copy engine and whole warpgroups.
//
//   kl_attention_sm90           2^(q k^T) v, divided by the sum of the powers, where scores are known to be small (see below)
//   kl_attention_sm90_running   softmax(q k^T * scale) v for any scores, with a running maximum
//   kl_attention_sm90_causal    query i sees keys 0 to i; heads that share keys lie in one tile
//
// Bound: tensor cores, 4 * queries * keys * 128 operations a head; and the power they draw.
// Needs: heads of 128, bf16, strides multiples of 8, 16-byte addresses.
//
// As many blocks as multiprocessors stay for the whole launch. Of a block one thread copies: queries of a tile, then keys and
// values, 128 a round, up to three rounds ahead (two with a mask). Two warpgroups have 64 queries each. While one round's scores
// become probabilities, the tensor cores have the product of the round before with its values, and the other warpgroup's products:
// without a mask the two take turns. Probabilities never leave registers: what a thread has of scores is what it needs of the second
// product's left operand. Two blocks are a cluster with the same keys, of which each copies one half for both.
//
// Without a maximum: softmax does not change when a constant is taken from all scores of a row, and in floating point neither does
// its precision. A maximum only keeps powers in range. Queries and keys that were normalised have lengths that their norms' weights
// bound, so scores are bounded, too; where 2^score can neither overflow nor vanish, no maximum is sought and no sum is ever scaled.
// Whoever made the queries has multiplied them by what makes scores exponents, so that this need not do it to every score.
//
// With a mask rows have more keys the later they come. A block's first warpgroup takes rows from the end, its second as many from the
// beginning: both together have as much to do in every block.
//
// Tiles are dealt out as kl_gemm_mma does, with clusters for blocks, and with sums go totals and maxima.
#include "mma.cuh"
#include "ptx_sm90.cuh"
#include "work_sm90.cuh"

constexpr int kHead = 128, kQueries = KL_SM90_BLOCK_Q, kKeys = KL_SM90_BLOCK_KV;
constexpr int kGroups = 2, kWarps = 4 * kGroups;
static_assert(kQueries == 64 * kGroups, "abi.h states another size");
static_assert(KL_SM90_ATTENTION_THREADS == 128 * (1 + kGroups), "abi.h states other threads: one warpgroup copies");
// Rows of 64 columns: how a tile of one head lies in shared memory, one half after the other.
constexpr uint32_t kRowBytes = 128, kQueryHalf = kQueries * kRowBytes, kKeyHalf = kKeys * kRowBytes;
constexpr uint32_t kQueryBytes = 2 * kQueryHalf, kKeyBytes = 2 * kKeyHalf;

template <int kStages_, int kCluster_, bool kRunning_, bool kCausal_>
struct Form {
  static constexpr int kStages = kStages_, kCluster = kCluster_;
  static constexpr bool kRunning = kRunning_, kCausal = kCausal_;
  // Barriers: of queries full and empty; of a stage's keys and values the same; then how many keys there are.
  static constexpr uint32_t kBarriersAt = kQueryBytes + 2 * kStages * kKeyBytes, kStageBarriers = 40;
  static constexpr uint32_t kSharedBytes = 1024 + kBarriersAt + 16 + kStages * kStageBarriers;
  static_assert(kSharedBytes <= 232448, "more than a multiprocessor has");
  static_assert(kKeys / kCluster % 8 == 0 && kKeys % 16 == 0, "the swizzle goes by eight rows, the second product by sixteen keys");
};

// Shared memory, and where a thread stands in it.
template <class F>
struct Room {
  uint32_t base, stage = 0, parity = 0;

  __device__ __forceinline__ uint32_t queries() const { return base; }
  __device__ __forceinline__ uint32_t keys(uint32_t i) const { return base + kQueryBytes + 2 * i * kKeyBytes; }
  __device__ __forceinline__ uint32_t values(uint32_t i) const { return keys(i) + kKeyBytes; }
  __device__ __forceinline__ uint32_t queries_full() const { return base + F::kBarriersAt; }
  __device__ __forceinline__ uint32_t queries_empty() const { return queries_full() + 8; }
  __device__ __forceinline__ uint32_t keys_full(uint32_t i) const { return queries_full() + 16 + i * F::kStageBarriers; }
  __device__ __forceinline__ uint32_t values_full(uint32_t i) const { return keys_full(i) + 8; }
  __device__ __forceinline__ uint32_t keys_empty(uint32_t i) const { return keys_full(i) + 16; }
  __device__ __forceinline__ uint32_t values_empty(uint32_t i) const { return keys_full(i) + 24; }
  __device__ __forceinline__ uint32_t count(uint32_t i) const { return keys_full(i) + 32; }
  __device__ __forceinline__ void advance() {
    if (++stage == F::kStages) stage = 0, parity ^= 1;
  }
};

// Where a tile lies, and its rounds.
template <class F>
struct Place {
  const KlAttentionSm90& p;
  uint32_t head, row;  // the first head; the tile's number among those of its heads
  uint32_t rows;       // of a head that a warpgroup has

  __device__ __forceinline__ Place(const KlAttentionSm90& p, uint32_t tile) : p(p), rows(64 / p.pack) {
    const uint32_t heads = tile / p.row_tiles;
    head = heads * p.pack, row = tile - heads * p.row_tiles;
    if constexpr (F::kCluster > 1) row = row * F::kCluster + cluster_rank();
  }

  // The first one of a warpgroup.
  __device__ __forceinline__ uint32_t query(uint32_t group) const {
    if constexpr (F::kCausal) return (group == 0 ? kGroups * p.row_tiles - 1 - row : row) * rows;
    return (kGroups * row + group) * rows;
  }

  // Where a warpgroup's rounds end: with a mask nobody sees a key past its last query. The first warpgroup has the most.
  __device__ __forceinline__ uint32_t last(const Item& item, uint32_t group) const {
    if constexpr (F::kCausal) return min(item.last, ceil_div<uint32_t>(query(group) + rows, kKeys));
    return item.last;
  }
};

// Which keys a round has.
struct Cursor {
  const KlAttentionSm90& p;
  uint32_t segment = 0, key;

  __device__ __forceinline__ Cursor(const KlAttentionSm90& p, uint32_t round) : p(p) {
    for (uint32_t count; round >= (count = ceil_div<uint32_t>(p.keys[segment], kKeys)); segment++) round -= count;
    key = round * kKeys;
  }

  __device__ __forceinline__ uint32_t count() const { return min(p.keys[segment] - key, kKeys); }

  __device__ __forceinline__ void next() {
    key += kKeys;
    if (key >= p.keys[segment]) segment++, key = 0;
  }
};

// The one thread that copies.
template <class F>
__device__ __forceinline__ void copy(const KlAttentionSm90& p, Room<F> room) {
  // Both halves of a head, of the rows that this block copies.
  const auto fetch = [&](uint32_t to, const KlTensorMap* map, uint32_t head, uint32_t row, uint32_t full) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      if constexpr (F::kCluster > 1) {
        constexpr uint32_t kOwn = kKeys / F::kCluster;
        const uint32_t own = cluster_rank() * kOwn;
        tma_load_2d_to_all(to + half * kKeyHalf + own * kRowBytes, map, head * kHead + half * 64, row + own, full,
                           (1 << F::kCluster) - 1);
      } else {
        tma_load_2d(to + half * kKeyHalf, map, head * kHead + half * 64, row, full);
      }
    }
  };
  uint32_t queries_parity = 1;
  Work<F::kCluster> work{p.schedule};
  for (Item item; work.next(item); queries_parity ^= 1) {
    const Place<F> at(p, item.tile);
    const uint32_t key_head = at.head / p.group, last = at.last(item, 0);
    barrier_wait(room.queries_empty(), queries_parity);
    barrier_arrive_expect(room.queries_full(), kQueryBytes);
    for (uint32_t group = 0; group < kGroups; group++) {
      for (uint32_t h = 0; h < p.pack; h++) {
        const uint32_t to = room.queries() + (group * 64 + h * at.rows) * kRowBytes, col = (at.head + h) * kHead;
#pragma unroll
        for (int half = 0; half < 2; half++) {
          tma_load_2d(to + half * kQueryHalf, &p.q, col + half * 64, at.query(group), room.queries_full());
        }
      }
    }
    Cursor cursor(p, item.first);
    for (uint32_t k = item.first; k < last; k++, room.advance(), cursor.next()) {
      const uint32_t i = room.stage, parity = room.parity ^ 1;
      barrier_wait(room.keys_empty(i), parity);
      store_shared(room.count(i), cursor.count());
      barrier_arrive_expect(room.keys_full(i), kKeyBytes);
      fetch(room.keys(i), &p.k[cursor.segment], key_head, cursor.key, room.keys_full(i));
      barrier_wait(room.values_empty(i), parity);
      barrier_arrive_expect(room.values_full(i), kKeyBytes);
      fetch(room.values(i), &p.v[cursor.segment], key_head, cursor.key, room.values_full(i));
    }
  }
}

// What a thread has of a tile: of two rows, eight apart, two columns of every eight.
template <class F>
struct Tile {
  float out[kHead / 2] = {}, total[2] = {}, top[2] = {-INFINITY, -INFINITY};
  float scores[kKeys / 2];
  uint32_t chances[kKeys / 4];
  float shrink[2];  // of sums, since the maximum rose

  // scores = q k^T
  __device__ __forceinline__ void multiply_keys(uint32_t queries, uint32_t keys) {
#pragma unroll
    for (int i = 0; i < kHead / 16; i++) {
      const uint64_t left = wgmma_operand(queries + i / 4 * kQueryHalf), right = wgmma_operand(keys + i / 4 * kKeyHalf);
      wgmma<kKeys>(scores, left + 2 * (i % 4), right + 2 * (i % 4), i > 0);
    }
    wgmma_commit();
  }

  // out += chances v
  __device__ __forceinline__ void multiply_values(uint32_t values) {
#pragma unroll
    for (int i = 0; i < kKeys / 16; i++) {
      wgmma_from_registers(out, &chances[4 * i], wgmma_columns(values + i * 16 * kRowBytes, kKeyHalf));
    }
    wgmma_commit();
  }

  // Hides scores whose key, counted from the round's first, is not under the limit of its row.
  __device__ __forceinline__ void mask(uint32_t limit0, uint32_t limit1) {
#pragma unroll
    for (int i = 0; i < kKeys / 2; i++) {
      if (i / 4 * 8 + lane() % 4 * 2 + i % 2 >= (i / 2 % 2 ? limit1 : limit0)) scores[i] = -INFINITY;
    }
  }

  // Scores become powers of two, and are added up.
  __device__ __forceinline__ void soften(float scale) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
      float most = 0.0f;
      if constexpr (F::kRunning) {
        most = top[h];
#pragma unroll
        for (int i = 0; i < kKeys / 8; i++) most = fmaxf(most, fmaxf(scores[4 * i + 2 * h], scores[4 * i + 2 * h + 1]));
        most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 1));
        most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 2));
        shrink[h] = power_of_two((top[h] - most) * scale);
        top[h] = most;
        total[h] *= shrink[h];
        most *= scale;
      }
      // Two sums, so that one addition need not wait for the other.
      float sum[2] = {};
#pragma unroll
      for (int i = 0; i < kKeys / 8; i++) {
#pragma unroll
        for (int e = 0; e < 2; e++) {
          float& v = scores[4 * i + 2 * h + e];
          v = power_of_two(F::kRunning ? v * scale - most : v);
          sum[e] += v;
        }
      }
      total[h] += sum[0] + sum[1];
    }
  }

  __device__ __forceinline__ void convert() {
#pragma unroll
    for (int i = 0; i < kKeys / 4; i++) chances[i] = pack(scores[2 * i], scores[2 * i + 1]);
  }

  __device__ __forceinline__ void rescale(const float (&by)[2]) {
#pragma unroll
    for (int i = 0; i < kHead / 2; i++) out[i] *= by[i / 2 % 2];
  }
};

// With the sums go totals and maxima.
template <class F>
using TileLeft = Left<F::kCluster, kWarps, kHead / 8 + 1>;

template <class F>
__device__ __forceinline__ void leave(const TileLeft<F>& left, const Tile<F>& tile) {
  left.put(0, make_float4(tile.total[0], tile.total[1], tile.top[0], tile.top[1]));
#pragma unroll
  for (int i = 0; i < kHead / 8; i++) {
    const float* v = &tile.out[4 * i];
    left.put(i + 1, make_float4(v[0], v[1], v[2], v[3]));
  }
  left.done();
}

template <class F>
__device__ __forceinline__ void add_left(const TileLeft<F>& left, Tile<F>& tile, float scale) {
  left.wait();
  const float4 other = left.get(0);
  float by[2] = {1.0f, 1.0f};
  if constexpr (F::kRunning) {
    const float theirs[2] = {other.z, other.w};
    float shrink[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const float most = fmaxf(tile.top[h], theirs[h]);
      shrink[h] = power_of_two((tile.top[h] - most) * scale), by[h] = power_of_two((theirs[h] - most) * scale);
      tile.total[h] *= shrink[h], tile.top[h] = most;
    }
    tile.rescale(shrink);
  }
  tile.total[0] += other.x * by[0], tile.total[1] += other.y * by[1];
#pragma unroll
  for (int i = 0; i < kHead / 8; i++) {
    const float4 v = left.get(i + 1);
    float* to = &tile.out[4 * i];
    to[0] += v.x * by[0], to[1] += v.y * by[0], to[2] += v.z * by[1], to[3] += v.w * by[1];
  }
}

// Of four lanes each has a word of four vectors; afterwards each has one vector, the one of its number.
__device__ __forceinline__ uint4 exchange(const uint32_t (&v)[4]) {
  const bool odd = lane() % 2, high = lane() / 2 % 2;
  const auto swap = [](bool second, uint32_t a, uint32_t b, uint32_t with) {
    const uint32_t theirs = __shfl_xor_sync(0xffffffffu, second ? a : b, with);
    return second ? make_uint2(theirs, b) : make_uint2(a, theirs);
  };
  const uint2 front = swap(odd, v[0], v[1], 1), back = swap(odd, v[2], v[3], 1);
  const uint2 x = swap(high, front.x, back.x, 2), y = swap(high, front.y, back.y, 2);
  return make_uint4(x.x, y.x, x.y, y.y);
}

template <class F>
__device__ __forceinline__ void store(const KlAttentionSm90& p, const Place<F>& at, uint32_t group, const Tile<F>& tile) {
  const uint32_t first = threadIdx.x % 128 / 32 * 16 + lane() / 4;
#pragma unroll
  for (int h = 0; h < 2; h++) {
    float total = tile.total[h];
    total += __shfl_xor_sync(0xffffffffu, total, 1);
    total += __shfl_xor_sync(0xffffffffu, total, 2);
    const float inverse = 1.0f / total;
    const uint32_t row = first + 8 * h, query = at.query(group) + row % at.rows;
    bf16* to = row_of<bf16>(p.out, min(query, p.out.rows - 1)) + (at.head + row / at.rows) * kHead + lane() % 4 * 8;
#pragma unroll
    for (int i = 0; i < kHead / 8; i += 4) {
      uint32_t v[4];
#pragma unroll
      for (int e = 0; e < 4; e++) v[e] = pack(tile.out[4 * (i + e) + 2 * h] * inverse, tile.out[4 * (i + e) + 2 * h + 1] * inverse);
      const uint4 eight = exchange(v);
      if (query < p.out.rows) *reinterpret_cast<uint4*>(to + 8 * i) = eight;
    }
  }
}

// The other warpgroups.
template <class F>
__device__ __forceinline__ void attend(const KlAttentionSm90& p, Room<F> room) {
  const uint32_t group = threadIdx.x / 128 - 1, own = 1 + group, other = 2 - group;
  const uint32_t queries = room.queries() + group * 64 * kRowBytes;
  // Once for every block that copies into what was read.
  const auto release = [&](uint32_t barrier) {
    if constexpr (F::kCluster > 1) {
      if (threadIdx.x % 128 < F::kCluster) barrier_arrive_at(barrier, threadIdx.x % 128);
    } else {
      if (threadIdx.x % 128 == 0) barrier_arrive(barrier);
    }
  };
  // Warpgroups take turns, unless they have unlike work; the first goes first.
  constexpr bool kTurns = !F::kCausal;
  if (kTurns && group == 1) meet_arrive(1);
  uint32_t queries_parity = 0;
  Work<F::kCluster> work{p.schedule};
  for (Item item; work.next(item); queries_parity ^= 1) {
    const Place<F> at(p, item.tile);
    const uint32_t last = at.last(item, group);
    Tile<F> tile;
    // Scores of round k have arrived.
    const auto scored = [&](uint32_t k, uint32_t count) {
      release(room.keys_empty(room.stage));
      if (k + 1 == last && threadIdx.x % 128 == 0) barrier_arrive(room.queries_empty());
      if (F::kCausal && k + 1 == last) {
        const uint32_t row = threadIdx.x % 128 / 32 * 16 + lane() / 4;
        // Keys up to the row's own, counted from the round's first.
        const auto limit = [&](uint32_t row) {
          return min(count, max(at.query(group) + row % at.rows + 1, k * kKeys) - k * kKeys);
        };
        tile.mask(limit(row), limit(row + 8));
      } else if (count < kKeys) {
        tile.mask(count, count);
      }
      tile.soften(p.scale);
    };
    barrier_wait(room.queries_full(), queries_parity);
    barrier_wait(room.keys_full(room.stage), room.parity);
    const uint32_t count = load_shared_word(room.count(room.stage));
    if constexpr (kTurns) meet_wait(own);
    wgmma_fence();
    tile.multiply_keys(queries, room.keys(room.stage));
    if constexpr (kTurns) meet_arrive(other);
    wgmma_wait<0>();
    scored(item.first, count);
    // Ends the product that is under way, if one is, and makes the next one's left operand. It stands behind a barrier, for
    // otherwise the compiler would wait for that product before it softens.
    uint32_t under_way = F::kStages;
    const auto prepare = [&](uint32_t full, uint32_t parity) {
      barrier_wait(full, parity);
      wgmma_wait<0>();
      if (under_way < F::kStages) release(room.values_empty(under_way));
      if constexpr (F::kRunning) tile.rescale(tile.shrink);
      tile.convert();
    };
    for (uint32_t k = item.first + 1; k < last; k++) {
      const uint32_t before = room.stage, before_parity = room.parity;
      room.advance();
      prepare(room.keys_full(room.stage), room.parity);
      const uint32_t count = load_shared_word(room.count(room.stage));
      if constexpr (kTurns) meet_wait(own);
      wgmma_fence();
      tile.multiply_keys(queries, room.keys(room.stage));
      barrier_wait(room.values_full(before), before_parity);
      wgmma_fence();
      tile.multiply_values(room.values(before));
      under_way = before;
      if constexpr (kTurns) meet_arrive(other);
      wgmma_wait<1>();
      scored(k, count);
    }
    prepare(room.values_full(room.stage), room.parity);
    wgmma_fence();
    tile.multiply_values(room.values(room.stage));
    wgmma_wait<0>();
    release(room.values_empty(room.stage));
    room.advance();
    if (!F::kCausal && item.last < p.schedule.k_blocks) {
      leave<F>({p.schedule, work.worker()}, tile);
    } else {
      if (!F::kCausal && item.first > 0) {
        uint32_t other = work.worker();
        do {
          add_left<F>({p.schedule, --other}, tile, p.scale);
        } while (front(p.schedule, other) > item.tile * p.schedule.k_blocks);
      }
      store(p, at, group, tile);
    }
    // Rounds that only the other has.
    for (uint32_t k = last; k < at.last(item, 0); k++, room.advance()) {
      barrier_wait(room.keys_full(room.stage), room.parity);
      release(room.keys_empty(room.stage));
      barrier_wait(room.values_full(room.stage), room.parity);
      release(room.values_empty(room.stage));
    }
  }
  if (kTurns && group == 0) meet_wait(1);  // the other's last arrival
}

template <class F>
__device__ __forceinline__ void attention(const KlAttentionSm90& p) {
  extern __shared__ __align__(1024) unsigned char dynamic[];
  // The swizzle goes by addresses.
  const Room<F> room{shared_address(dynamic) + 1023 & ~1023u};
  if (threadIdx.x == 0) {
    prefetch_map(&p.q), prefetch_map(&p.k[0]), prefetch_map(&p.v[0]);
    barrier_init(room.queries_full(), 1);
    barrier_init(room.queries_empty(), kGroups);
    for (int i = 0; i < F::kStages; i++) {
      barrier_init(room.keys_full(i), 1), barrier_init(room.values_full(i), 1);
      barrier_init(room.keys_empty(i), kGroups * F::kCluster), barrier_init(room.values_empty(i), kGroups * F::kCluster);
    }
    fence_barrier_init();
  }
  if constexpr (F::kCluster > 1) {
    cluster_meet();
  } else {
    __syncthreads();
  }
  launch_next_kernel();
  if (threadIdx.x < 128) {
    give_registers<24>();
    if (threadIdx.x == 0) {
      wait_for_previous_kernel();
      copy(p, room);
    }
    __syncwarp();
  } else {
    take_registers<240>();
    wait_for_previous_kernel();
    attend(p, room);
  }
  if constexpr (F::kCluster > 1) cluster_meet();  // nobody leaves while the other copies into it or arrives at its barriers
}

using Bounded = Form</*stages*/ 3, KL_SM90_CLUSTER, /*running*/ false, /*causal*/ false>;
using Running = Form</*stages*/ 3, KL_SM90_CLUSTER, /*running*/ true, /*causal*/ false>;
using Causal = Form</*stages*/ 2, /*cluster*/ 1, /*running*/ true, /*causal*/ true>;
static_assert(Bounded::kSharedBytes == KL_SM90_ATTENTION_SHARED, "abi.h states another size");
static_assert(Causal::kSharedBytes == KL_SM90_CAUSAL_SHARED, "abi.h states another size");
static_assert(sizeof(KlAttentionSm90) % 128 == 0, "abi.h leaves a gap");

KL_ENTRY(kl_attention_sm90, KlAttentionSm90, KL_SM90_ATTENTION_THREADS, 1) { attention<Bounded>(p); }
KL_ENTRY(kl_attention_sm90_running, KlAttentionSm90, KL_SM90_ATTENTION_THREADS, 1) { attention<Running>(p); }
KL_ENTRY(kl_attention_sm90_causal, KlAttentionSm90, KL_SM90_ATTENTION_THREADS, 1) { attention<Causal>(p); }
