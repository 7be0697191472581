// TMA: box loads with multicast, box stores, and bulk copies. Each runs at a random moment after it was issued.
#include <string.h>

#include <algorithm>

#include "async_sm90.h"
#include "async_publication.h"
#include "async_state.h"
#include "tma_map.h"

namespace kl_emu {
namespace {

constexpr uint32_t kBoxAlignment = 128, kChunk = 16;

// Checks the part of a box that exists in the tensor when the copy is issued, so messages name the thread.
void check_box(const TensorMap& map, const int32_t (&origin)[kTmaRank], bool write, const char* operation) {
  for (uint32_t i = 0; i < map.box[1] * map.box[2]; i++) {
    const BoxRow part = box_row(map, origin, i);
    const uint32_t bytes = (part.end - part.first) * map.element_bytes;
    if (bytes) (write ? check_global_write : check_global_read)(reinterpret_cast<const void*>(part.address), bytes, operation);
  }
}

// Copies a box from global memory to a CTA's shared memory. Where the tensor has no elements, it writes zeros.
struct BoxLoad : Async {
  Cta* cta;
  TensorMap map;
  int32_t origin[kTmaRank];
  uint32_t to;
  Mbarrier* barrier;
  std::string issuer;

  void run() override {
    std::vector<unsigned char> row(map.row_bytes());
    for (uint32_t i = 0; i < map.box[1] * map.box[2]; i++) {
      const BoxRow part = box_row(map, origin, i);
      std::fill(row.begin(), row.end(), 0);
      if (const uint32_t bytes = (part.end - part.first) * map.element_bytes) {
        memcpy(row.data() + part.first * map.element_bytes, reinterpret_cast<const void*>(part.address), bytes);
      }
      for (uint32_t chunk = 0; chunk < map.row_bytes(); chunk += kChunk) {
        memcpy(cta->arena + swizzled(to + i * map.row_bytes() + chunk, map.swizzle), &row[chunk], kChunk);
      }
    }
    release_claim(*cta, to, map.box_bytes(), true, agent_of(*barrier));
    mbarrier_complete_bytes(*barrier, map.box_bytes());
  }

  std::string describe() const override { return issuer + format(" to +0x%x of the CTA of rank %u", to, cta->rank); }
};

struct BulkLoad : Async {
  Cta* cta;
  const void* from;
  uint32_t to, bytes;
  Mbarrier* barrier;
  std::string issuer;

  void run() override {
    memcpy(cta->arena + to, from, bytes);
    release_claim(*cta, to, bytes, true, agent_of(*barrier));
    mbarrier_complete_bytes(*barrier, bytes);
  }

  std::string describe() const override { return issuer + format(" to +0x%x", to); }
};

// A store in two steps, both at any later moment: the box is read from shared memory, then written to global memory.
struct Store {
  TensorMap map;
  int32_t origin[kTmaRank];
  std::string issuer;
};

struct BoxWrite : Async {
  Store store;
  std::vector<unsigned char> box;

  void run() override {
    const TensorMap& map = store.map;
    for (uint32_t i = 0; i < map.box[1] * map.box[2]; i++) {
      const BoxRow part = box_row(map, store.origin, i);
      const uint32_t bytes = (part.end - part.first) * map.element_bytes;
      if (bytes == 0) continue;
      memcpy(reinterpret_cast<void*>(part.address), &box[i * map.row_bytes() + part.first * map.element_bytes], bytes);
    }
  }

  std::string describe() const override { return store.issuer + ", writing to global memory"; }
};

struct BoxRead : Async {
  Cta* cta;
  uint32_t from, warp;
  Store store;
  std::shared_ptr<bool> done;
  ThreadState* thread;

  uint32_t agent() const { return kStoreAgents + warp % 4; }

  void run() override {
    const TensorMap& map = store.map;
    auto write = std::make_unique<BoxWrite>();
    write->box.resize(map.box_bytes());
    for (uint32_t at = 0; at < map.box_bytes(); at += kChunk) {
      memcpy(&write->box[at], cta->arena + swizzled(from + at, map.swizzle), kChunk);
    }
    write->store = store;
    release_claim(*cta, from, map.box_bytes(), false, agent());
    *done = true;
    release_async_to(thread->stores_read, agent());
    wake_all(thread->waiting_for_stores);
    post(std::move(write));
  }

  std::string describe() const override { return store.issuer + format(" from +0x%x", from); }
};

}  // namespace

namespace ptx {

void tma_load(uint32_t to, const void* encoded, uint32_t rank, int32_t x, int32_t y, int32_t z, uint32_t barrier, uint32_t mask) {
  const TensorMap& map = decode_map(encoded, rank, "TMA load");
  const std::string issuer = issued_by("TMA load");
  const int32_t origin[kTmaRank] = {x, y, z};
  check_box(map, origin, false, "TMA load");
  for (uint32_t i = 0; i < map.box[1] * map.box[2]; i++) {
    const BoxRow row = box_row(map, origin, i);
    if (row.end > row.first) check_tma_load(reinterpret_cast<const void*>(row.address), (row.end - row.first) * map.element_bytes);
  }
  const uint32_t own = 1u << current_cta().rank;
  for (uint32_t target = 0, targets = mask ? mask : own; targets >> target; target++) {
    if (!(targets >> target & 1)) continue;
    Cta& cta = cta_of_rank(target);
    auto load = std::make_unique<BoxLoad>();
    load->cta = &cta, load->map = map, load->to = to, load->issuer = issuer;
    std::copy(origin, origin + kTmaRank, load->origin);
    load->barrier = &mbarrier_at(cta, barrier, true, "TMA load");
    claim(cta, to, map.box_bytes(), kBoxAlignment, true, agent_of(*load->barrier), issuer);
    post(std::move(load));
  }
}

void bulk_load(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier) {
  KL_EMU_CHECK(bytes % kChunk == 0 && reinterpret_cast<uintptr_t>(from) % kChunk == 0,
               "bulk copy of %u bytes from %p: both must be multiples of %u", bytes, from, kChunk);
  Cta& cta = current_cta();
  auto load = std::make_unique<BulkLoad>();
  load->cta = &cta, load->from = from, load->to = to, load->bytes = bytes, load->issuer = issued_by("bulk copy");
  load->barrier = &mbarrier_at(cta, barrier, true, "bulk copy");
  check_global_read(from, bytes, "bulk copy");
  claim(cta, to, bytes, kChunk, true, agent_of(*load->barrier), load->issuer);
  post(std::move(load));
}

void tma_store(const void* encoded, uint32_t from, uint32_t rank, int32_t x, int32_t y, int32_t z) {
  const TensorMap& map = decode_map(encoded, rank, "TMA store");
  Cta& cta = current_cta();
  ThreadState& thread = state_of(current());
  auto read = std::make_unique<BoxRead>();
  read->cta = &cta, read->from = from, read->warp = current_warp().index;
  read->store = {map, {x, y, z}, issued_by("TMA store")};
  read->done = std::make_shared<bool>(false);
  read->thread = &thread;
  check_box(map, read->store.origin, true, "TMA store");
  claim(cta, from, map.box_bytes(), kBoxAlignment, false, read->agent(), read->store.issuer);
  thread.stores.push_back(read->done);
  check_at_exit(cta);
  post(std::move(read));
}

void tma_store_wait(uint32_t pending) {
  ThreadState& thread = state_of(current());
  while (thread.stores.size() > pending) {
    wait_until(
        thread.waiting_for_stores, [&] { return *thread.stores.front(); }, [&] { return format("a TMA store to read its box"); });
    thread.stores.pop_front();
    acquire_from(thread.stores_read);
  }
}

}  // namespace ptx
}  // namespace kl_emu
