// Switches between the stacks of fibers. A switch saves only callee-saved registers and makes no system call.
#pragma once

#include <stddef.h>

namespace kl_emu {

struct Context {
  void* stack_pointer = nullptr;
};

// Prepares a context that calls `entry` on the given stack when it is first switched to. `entry` must never return.
void prepare(Context& context, void* stack, size_t bytes, void (*entry)());

// Saves the current state in `from` and continues with `to`.
void switch_context(Context& from, const Context& to);

}  // namespace kl_emu
