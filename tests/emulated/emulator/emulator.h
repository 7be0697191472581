/* The interface of the emulator to the host: what an emulating CUDA driver needs.
 *
 * A function that can fail returns a message, which is valid until the next call, or null. All state belongs to the calling thread. */
#ifndef KILN_EMULATOR_H
#define KILN_EMULATOR_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Finds a kernel by module (the name of its file without extension) and symbol; -1 if there is none. */
int32_t kl_emu_kernel(const char* module, const char* symbol, uint64_t* param_bytes, uint32_t* max_threads);

/* `cluster` CTAs along x form a cluster. `overlap` allows the kernel to start before the previous one has ended. `capability` is the GPU's
 * compute capability, ten times the major version plus the minor one: tensor cores differ in how they add up. */
typedef struct {
  uint32_t grid[3];
  uint32_t threads, shared, cluster, overlap, capability;
} KlEmuLaunch;

/* Queues a launch and runs what was queued before. The seed decides the order of everything that hardware leaves open. */
const char* kl_emu_launch(int32_t kernel, const KlEmuLaunch* launch, const void* params, uint64_t seed);

/* Runs everything that is queued. */
const char* kl_emu_finish(void);

/* Limits the steps of a launch, which fails if it takes more. The default is 2^32. */
void kl_emu_step_limit(uint64_t steps);

/* Sets the CPU time without a step after which the process ends. The default is 60 s. */
void kl_emu_patience(double seconds);

/* Registers global memory. Kernels may access only what is allocated. Addresses are host addresses. */
void kl_emu_allocate(uint64_t address, uint64_t bytes);
void kl_emu_free(uint64_t address);

/* A TMA tensor map. Sizes are in elements, innermost dimension first; pitches in bytes; swizzle is 0, 32, 64 or 128 bytes. */
typedef struct {
  uint64_t address;
  uint32_t element_bytes, rank;
  uint64_t size[3];
  uint64_t pitch[2];
  uint32_t box[3];
  uint32_t swizzle;
} KlEmuMap;

/* Encodes a tensor map, checked by the driver's rules. */
const char* kl_emu_tensor_map(uint64_t out[16], const KlEmuMap* map);

/* Tests the arithmetic of tensor cores. Returns the failure, or null. */
const char* kl_emu_selftest(void);

#ifdef __cplusplus
}
#endif

#endif
