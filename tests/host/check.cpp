#include "runtime.h"
namespace simt {
void atomic_access(const void *, size_t) {}
namespace check {
bool on = false;
void begin_launch(const Launch &, unsigned, char *, char *) {}
void begin_block(unsigned) {}
void read(const void *, size_t, uintptr_t) {}
void write(const void *, size_t, uintptr_t) {}
void copy_issued(const Copy &) {}
void copy_landed(const Copy &) {}
void sync_warp(unsigned, unsigned) {}
void arrive(int, unsigned, unsigned, bool) {}
void leave(int, unsigned, unsigned) {}
void reset(int) {}
}
}
