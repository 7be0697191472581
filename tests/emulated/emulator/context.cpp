// Stack switching: a few lines of assembly for x86-64 and aarch64, ucontext elsewhere.
#include "context.h"

#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) || defined(__aarch64__)

extern "C" void kl_emu_switch(void** from, void* to);

#if defined(__x86_64__)

asm(R"(
.text
.globl kl_emu_switch
.type kl_emu_switch, @function
kl_emu_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size kl_emu_switch, .-kl_emu_switch
)");

namespace {
// Six registers, the return address, and the slot that a call would have left: the ABI wants the stack 16-byte aligned before a call.
constexpr size_t kSavedWords = 8, kEntryWord = 6;
}  // namespace

#else

asm(R"(
.text
.globl kl_emu_switch
.type kl_emu_switch, %function
kl_emu_switch:
  sub sp, sp, #160
  stp x19, x20, [sp, #0]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x19, x20, [sp, #0]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
.size kl_emu_switch, .-kl_emu_switch
)");

namespace {
constexpr size_t kSavedWords = 20, kEntryWord = 11;
}  // namespace

#endif

namespace kl_emu {

void prepare(Context& context, void* stack, size_t bytes, void (*entry)()) {
  uint64_t* top = reinterpret_cast<uint64_t*>((reinterpret_cast<uintptr_t>(stack) + bytes) & ~uintptr_t{15});
  uint64_t* saved = top - kSavedWords;
  memset(saved, 0, kSavedWords * sizeof(uint64_t));
  saved[kEntryWord] = reinterpret_cast<uintptr_t>(entry);
  context.stack_pointer = saved;
}

void switch_context(Context& from, const Context& to) { kl_emu_switch(&from.stack_pointer, to.stack_pointer); }

}  // namespace kl_emu

#else

#include <ucontext.h>

namespace kl_emu {

// The saved state lies at the top of the stack it belongs to. For the host thread it is allocated on the first switch.
void prepare(Context& context, void* stack, size_t bytes, void (*entry)()) {
  ucontext_t* state = reinterpret_cast<ucontext_t*>((reinterpret_cast<uintptr_t>(stack) + bytes - sizeof(ucontext_t)) & ~uintptr_t{63});
  getcontext(state);
  state->uc_stack.ss_sp = stack;
  state->uc_stack.ss_size = reinterpret_cast<uintptr_t>(state) - reinterpret_cast<uintptr_t>(stack);
  state->uc_link = nullptr;
  makecontext(state, entry, 0);
  context.stack_pointer = state;
}

void switch_context(Context& from, const Context& to) {
  if (!from.stack_pointer) from.stack_pointer = new ucontext_t;
  swapcontext(static_cast<ucontext_t*>(from.stack_pointer), static_cast<ucontext_t*>(to.stack_pointer));
}

}  // namespace kl_emu

#endif
