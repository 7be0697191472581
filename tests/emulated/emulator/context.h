// Switching between stacks: what a fiber is made of. Only callee-saved registers are kept, without a system call.
#pragma once

#include <stddef.h>

namespace kl_emu {

struct Context {
  void* stack_pointer = nullptr;
};

// Prepares a context that calls `entry` on the given stack when it is first switched to. `entry` must never return.
void prepare(Context& context, void* stack, size_t bytes, void (*entry)());

// Saves the present state in `from` and continues with `to`.
void switch_context(Context& from, const Context& to);

}  // namespace kl_emu
