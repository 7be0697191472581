// The kernel line where an error happened. When a fiber fails, return addresses are taken from its stack and translated by addr2line, which
// comes with the compiler's binutils. Without addr2line or line tables, a message has no line.
#include <dlfcn.h>
#include <execinfo.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "machine.h"

namespace kl_emu {

void capture_frames() {
  Machine& m = machine();
  m.frame_count = backtrace(m.frames.data(), static_cast<int>(m.frames.size()));
}

// The path of a source file, relative to the kernels' parent folder.
static std::string short_path(const char* path) {
  const char* folder = strstr(path, "kernels/");
  const char* name = strrchr(path, '/');
  return folder ? folder : name ? name + 1 : path;
}

static bool names_file_with(const std::string& line, const char* extension) { return line.find(extension) != std::string::npos; }

std::string source_of_frames() {
  Machine& m = machine();
  const int count = m.frame_count;
  m.frame_count = 0;
  Dl_info own;
  if (count == 0 || !dladdr(reinterpret_cast<void*>(&capture_frames), &own)) return {};
  // The program's name may be relative to a previous working folder.
  char* program = realpath(own.dli_fname[0] == '/' ? own.dli_fname : "/proc/self/exe", nullptr);
  if (!program) return {};
  std::string command = format("addr2line -i -e '%s'", program);
  free(program);
  for (int i = 0; i < count; i++) {
    // A return address is after the call, which may be on another line.
    const uint64_t offset = static_cast<char*>(m.frames[i]) - static_cast<char*>(own.dli_fbase) - 1;
    command += format(" 0x%llx", static_cast<unsigned long long>(offset));
  }
  FILE* output = popen((command + " 2>/dev/null").c_str(), "r");
  if (!output) return {};
  // The innermost line of a kernel file. If that is a header, also the line of the .cu file that led there.
  std::string innermost, entry;
  char line[1024];
  while (fgets(line, sizeof(line), output)) {
    line[strcspn(line, " \n")] = 0;
    if (innermost.empty() && (names_file_with(line, ".cuh:") || names_file_with(line, ".cu:"))) innermost = short_path(line);
    if (entry.empty() && names_file_with(line, ".cu:")) entry = short_path(line);
  }
  pclose(output);
  if (innermost.empty()) return {};
  return innermost == entry || entry.empty() ? ", at " + innermost : ", at " + innermost + " from " + entry;
}

}  // namespace kl_emu
