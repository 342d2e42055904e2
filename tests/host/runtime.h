// Inside of the runtime: what the scheduler (simt.cpp), the twins of warp-wide instructions
// (twins.cpp) and the memory checker (check.cpp) know of each other.
#pragma once
#include <csetjmp>
#include <string>
#include <vector>

#include "simt.h"

namespace simt {
struct Copy {  // a cp.async on its way
  char* to;
  const char* from;
  unsigned bytes, valid;
  int group;
  uintptr_t pc;
};
struct Post {  // what a lane brings to a warp-wide instruction
  Site site;
  unsigned mask;
  const void* value;
  void* result;
  size_t bytes;
  unsigned source;
  int barrier, threads;
  bool wait;
};
struct Fibre {
  jmp_buf context;
  char* stack;  // its lowest byte
  bool started;
  uint3 tid;
  unsigned thread, lane, warp;
  Post post;
  std::vector<Copy> copies;
  int group;
};
struct Region {  // global memory a kernel may touch
  const char* name;
  uintptr_t begin, end;
  int writable;
};
struct Launch {  // mirrored in simt.py
  unsigned grid[3], block[3];
  uint64_t shared_bytes;
  unsigned order;              // 0 ascending, 1 descending, otherwise a seed
  unsigned check;              // 0 nothing, else bits of Check
  unsigned together, padding;  // whether all blocks run at once
  uint64_t region_count;
  const Region* regions;
};
enum Check : unsigned { kMemory = 1, kUninitialised = 2 };
constexpr size_t kStackBytes = 256 << 10, kPage = 4096;

struct Signals {  // signals.cpp: handlers, for as long as the object lives
  Signals();
  ~Signals();
};

extern Fibre* current;  // null while the scheduler runs
int launch(const Launch& launch, void (*body)(void*), void* context);
[[noreturn]] void fail(
    const std::string& message);  // ends the launch, from a fibre or from the scheduler
std::string describe(const Site& site);
std::string describe(uintptr_t pc);  // a token that simt.py turns into file:line
std::string describe_thread(unsigned thread);

namespace check {
extern bool on;
void begin_launch(const Launch& launch, unsigned threads, char* stacks, char* shared);
void begin_block(unsigned block);
void read(const void* p, size_t bytes, uintptr_t pc);
void write(const void* p, size_t bytes, uintptr_t pc);
void copy_issued(const Copy& copy);
void copy_landed(const Copy& copy);
void sync_warp(unsigned first_thread, unsigned lanes);
void arrive(int barrier, unsigned first_thread, unsigned lanes, bool wait);
void leave(int barrier, unsigned first_thread, unsigned lanes);  // wakes from it
void reset(int barrier);
}  // namespace check
}  // namespace simt
